"""The recipe of a span QA fine-tuning: what each field means, its unit, its bounds.

Source: BERT, arXiv:1810.04805, section 4.2; Jeong et al., HCLT 2023, for longer positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quiver.encoder.training.recipe_file import load_sections
from quiver.encoder.training.schema import Rule
from quiver.eval.nlu.answer_scores import Official
from quiver.eval.nlu.fine_tuning.sections import FineTuningSection, UpdatesSection
from quiver.eval.nlu.windows import WindowSettings

KINDS = ("span_qa",)
"""Values of ``kind`` that make a recipe one of these."""


@dataclass(frozen=True)
class QaModelSection:
    """The encoder."""

    init: str = field(metadata={"not_blank": True})
    """Folder or hub id of an encoder with its tokenizer, or of a model that answers with spans already; of a model of
    sentence-transformers the encoder is taken."""
    extend_positions: int = field(default=1, metadata={"at_least": 1})
    """How many times as many absolute positions it gets before it is trained; 1 for those it has."""
    attention_dropout: float | None = field(default=None, metadata={"at_least": 0, "below": 1})
    """Share of the attention weights that training drops; null for the model's own."""


@dataclass(frozen=True)
class QaDataSection:
    """Questions, in SQuAD's JSON. Paths are relative to the working directory."""

    train: str = field(metadata={"not_blank": True})
    """File of the questions to train on."""
    test: str = field(metadata={"not_blank": True})
    """File of the questions that are answered in the end; may be the same."""
    official: Official
    """Whose script defines the scores."""
    train_split: str | None = field(default=None, metadata={"not_blank": True})
    """A ``.tsv`` of judgements whose questions are trained on; null for all of the file."""
    test_split: str | None = field(default=None, metadata={"not_blank": True})
    """The same for the test."""
    development: str | None = field(default=None, metadata={"not_blank": True})
    """File of the questions whose F1 says which checkpoint is best, and when to stop; null to take the last one."""
    development_split: str | None = field(default=None, metadata={"not_blank": True})
    """As ``train_split``."""
    limit: int | None = field(default=None, metadata={"at_least": 1})
    """Questions that are trained on, the first of them; null for all."""


@dataclass(frozen=True)
class QaRecipe:
    """One fine-tuning, fully determined but for the machine."""

    name: str = field(metadata={"not_blank": True})
    """Short name of the run."""
    description: str = field(metadata={"not_blank": True})
    """What it trains and what for."""
    kind: Literal["span_qa"]
    """Whose recipe this is."""
    source: str = field(metadata={"not_blank": True})
    """Paper or script that the settings come from."""
    cost: str = field(metadata={"not_blank": True})
    """Time and machine of a whole run."""
    expected: str = field(metadata={"not_blank": True})
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
        RecipeError: The recipe cannot be used; names everything that is wrong with it.
        InputError: There is no such recipe, or it cannot be read.
    """
    return load_sections(path, QaRecipe, RULES, kinds=KINDS, overrides=overrides)
