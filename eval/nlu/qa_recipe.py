"""The recipe of a span QA fine-tuning: what each field means, its unit, its bounds.

Source: BERT, arXiv:1810.04805, section 4.2 and appendix A.3, for the usual values; Jeong et al., HCLT 2023, for longer positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from encoder.running.recipe_file import load_sections
from encoder.running.schema import Rule
from eval.nlu.answer_scores import Official
from eval.nlu.windows import WindowSettings

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
    limit: int | None = field(default=None, metadata={"at_least": 1})
    """Questions that are trained on, the first of them; null for all."""


@dataclass(frozen=True)
class QaTrainingSection:
    """How it is trained."""

    epochs: float = field(metadata={"above": 0})
    """Passes over all windows."""
    batch_size: int = field(metadata={"at_least": 1})
    """Windows of an update."""
    learning_rate: float = field(metadata={"above": 0, "at_most": 1})
    """Peak of the schedule; BERT: 3e-5 to 5e-5."""
    warmup_ratio: float = field(default=0.1, metadata={"at_least": 0, "at_most": 1})
    """Share of the updates over which the learning rate rises from zero; then it falls to zero in a line."""
    weight_decay: float = field(default=0.01, metadata={"at_least": 0, "at_most": 1})
    """Of matrices and embeddings, decoupled, per unit of learning rate."""
    max_grad_norm: float = field(default=1.0, metadata={"above": 0})
    """L2 norm that the gradient is clipped to."""
    seed: int = field(default=12, metadata={"at_least": 0, "at_most": 2**32 - 1})
    """Of the head's weights, the order of the windows and dropout."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of the forward and backward pass; weights and optimiser state stay float32."""
    log_every: int = field(default=10, metadata={"at_least": 1})
    """Updates between two losses in run.json."""


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
    training: QaTrainingSection
    """How it is trained."""


RULES = (
    Rule(
        ("windows.overlap", "windows.max_answer_length"),
        lambda overlap, longest: overlap < longest,
        "must be >= {1}, max_answer_length, so that no answer is cut; got {0}",
    ),
)


def load_qa_recipe(path: str | Path, overrides: Sequence[str] = ()) -> QaRecipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: ``training.epochs=1`` and the like, see `encoder.running.recipe_file.load_sections`.

    Raises:
        RecipeError: The recipe cannot be used; names everything that is wrong with it.
        InputError: There is no such recipe, or it cannot be read.
    """
    return load_sections(path, QaRecipe, RULES, kinds=KINDS, overrides=overrides)
