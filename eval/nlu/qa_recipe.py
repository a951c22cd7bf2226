"""Recipe of a fine-tuning for span question answering: meaning, unit and bounds of each field.

Source: BERT, arXiv:1810.04805, section 4.2; Jeong et al., HCLT 2023, for longer positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from quiver.encoder.schema import Field, NonBlank, Rule, TextSchema
from quiver.encoder.training.recipe_file import load_sections
from quiver.eval.nlu.answer_scores import Official
from quiver.eval.nlu.fine_tuning.sections import FineTuningSection, UpdatesSection
from quiver.eval.nlu.windows import WindowSettings

KINDS = ("span_qa",)
"""Values of ``kind`` that select this recipe type."""


class QaModelSection(TextSchema):
    """The encoder."""

    init: NonBlank
    """Folder or hub id of an encoder with its tokenizer, or of a span question answering model; of a sentence-transformers model, the
    encoder is used."""
    extend_positions: int = Field(default=1, ge=1)
    """Factor by which the absolute positions are extended before training; 1 for no extension."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout of the attention weights in training; null for the model's own."""


class QaDataSection(TextSchema):
    """The questions, in SQuAD's JSON format. Paths are relative to the working directory."""

    train: NonBlank
    """File of the training questions."""
    test: NonBlank
    """File of the test questions, which are answered after training; may be the same file."""
    official: Official
    """Official script that defines the scores."""
    train_split: NonBlank | None = None
    """``.tsv`` file of judgements that selects the training questions; null for all questions in the file."""
    test_split: NonBlank | None = None
    """The same for the test questions."""
    development: NonBlank | None = None
    """File of the development questions, whose F1 selects the best checkpoint and stops early; null to keep the last checkpoint."""
    development_split: NonBlank | None = None
    """The same as ``train_split`` for the development questions."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of training questions, from the first; null for all."""


class QaRecipe(TextSchema):
    """Recipe of one fine-tuning; fixes everything except the machine."""

    name: NonBlank
    """Short name of the run."""
    description: NonBlank
    """What the run trains, and for what purpose."""
    kind: Literal["span_qa"]
    """Recipe type."""
    source: NonBlank
    """Paper or script that the settings come from."""
    cost: NonBlank
    """Time and machine of a whole run."""
    expected: NonBlank
    """Expected score of a whole run, with its tolerance."""
    model: QaModelSection
    """The encoder."""
    data: QaDataSection
    """The questions."""
    windows: WindowSettings
    """Lengths of the windows into which paragraphs are split."""
    updates: UpdatesSection
    """Epochs, batch size (in windows), learning rate and evaluation."""
    training: FineTuningSection
    """Optimiser, schedule, precision, logging and checkpoints."""


RULES = (
    Rule(
        ("windows.overlap", "windows.max_answer_length"),
        lambda overlap, longest: overlap < longest,
        "must be >= {1}, max_answer_length, so that no answer is cut; got {0}",
    ),
    Rule(
        ("training.patience", "data.development"),
        lambda patience, development: patience is not None and development is None,
        "needs data.development, whose scores it counts",
    ),
    Rule(
        ("data.development_split", "data.development"),
        lambda split, development: split is not None and development is None,
        "needs data.development, of which it is a part",
    ),
)


def load_qa_recipe(path: str | Path, overrides: Sequence[str] = ()) -> QaRecipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: Changes such as ``updates.epochs=1``, see `quiver.encoder.training.recipe_file.load_sections`.

    Raises:
        SchemaError: The recipe is invalid; lists all problems.
        InputError: The recipe does not exist or cannot be read.
    """
    return load_sections(path, QaRecipe, RULES, kinds=KINDS, overrides=overrides)
