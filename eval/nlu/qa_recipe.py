"""The recipe of a span QA fine-tuning: what each field means, its unit, its bounds.

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
"""Values of ``kind`` that make a recipe one of these."""


class QaModelSection(TextSchema):
    """The encoder."""

    init: NonBlank
    """Folder or hub id of an encoder with its tokenizer, or of a model that answers with spans already; of a model of
    sentence-transformers the encoder is taken."""
    extend_positions: int = Field(default=1, ge=1)
    """How many times as many absolute positions it gets before it is trained; 1 for those it has."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Share of the attention weights that training drops; null for the model's own."""


class QaDataSection(TextSchema):
    """Questions, in SQuAD's JSON. Paths are relative to the working directory."""

    train: NonBlank
    """File of the questions to train on."""
    test: NonBlank
    """File of the questions that are answered in the end; may be the same."""
    official: Official
    """Whose script defines the scores."""
    train_split: NonBlank | None = None
    """A ``.tsv`` of judgements whose questions are trained on; null for all of the file."""
    test_split: NonBlank | None = None
    """The same for the test."""
    development: NonBlank | None = None
    """File of the questions whose F1 says which checkpoint is best, and when to stop; null to take the last one."""
    development_split: NonBlank | None = None
    """As ``train_split``."""
    limit: int | None = Field(default=None, ge=1)
    """Questions that are trained on, the first of them; null for all."""


class QaRecipe(TextSchema):
    """One fine-tuning, fully determined but for the machine."""

    name: NonBlank
    """Short name of the run."""
    description: NonBlank
    """What it trains and what for."""
    kind: Literal["span_qa"]
    """Whose recipe this is."""
    source: NonBlank
    """Paper or script that the settings come from."""
    cost: NonBlank
    """Time and machine of a whole run."""
    expected: NonBlank
    """Score that a whole run reaches, with its tolerance."""
    model: QaModelSection
    """The encoder."""
    data: QaDataSection
    """The questions."""
    windows: WindowSettings
    """How paragraphs are cut."""
    updates: UpdatesSection
    """How many updates, of how many windows, at what rate."""
    training: FineTuningSection
    """How it is trained, and what is kept on the way."""


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
        overrides: ``updates.epochs=1`` and the like, see `quiver.encoder.training.recipe_file.load_sections`.

    Raises:
        SchemaError: The recipe cannot be used; names everything that is wrong with it.
        InputError: There is no such recipe, or it cannot be read.
    """
    return load_sections(path, QaRecipe, RULES, kinds=KINDS, overrides=overrides)
