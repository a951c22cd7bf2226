"""Recipe of the fine-tuning on GLUE: one file for all tasks, with the settings of each task.

Source: ModernBERT, arXiv:2412.13663, appendix E.1 and Table 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from quiver.encoder.schema import Field, NonBlank, SchemaError, TextSchema
from quiver.encoder.training.recipe_file import load_sections
from quiver.eval.nlu.fine_tuning.sections import FineTuningSection, UpdatesSection
from quiver.eval.nlu.glue_tasks import TASKS, TaskName

KINDS = ("glue",)
"""Values of ``kind`` that select this recipe type."""

MNLI: TaskName = "mnli"
"""Task whose model other tasks may start from."""


class GlueModelSection(TextSchema):
    """The encoder."""

    init: NonBlank
    """Folder or hub id of an encoder with its tokenizer; of a sentence-transformers model, the encoder is used."""
    pooling: Literal["mean", "cls"] | None = None
    """Pooling of the token vectors: ``cls`` (first token) or ``mean``; null for the setting in config.json."""
    from_mnli: tuple[TaskName, ...] = ()
    """Tasks that start from the model trained on MNLI, with a new output layer. The paper: RTE, MRPC, STS-B."""


class GlueDataSection(TextSchema):
    """The data. Paths are relative to the working directory."""

    source: NonBlank
    """``hub://OWNER/NAME[@REVISION]``, or a folder with the same layout, see `quiver.eval.nlu.glue_data`."""
    max_length: int = Field(default=256, ge=16)
    """Maximum tokens per text or pair, special tokens included; longer inputs are truncated. The release: 256."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of training examples per task, from the first; null for all."""


class GlueTasksSection(TextSchema):
    """Settings of each task; a task that is left out is not trained."""

    cola: UpdatesSection | None = None
    """Linguistic acceptability of a sentence."""
    sst2: UpdatesSection | None = None
    """Sentiment of a sentence from a film review."""
    mrpc: UpdatesSection | None = None
    """Whether two sentences from the news are paraphrases."""
    stsb: UpdatesSection | None = None
    """Similarity of two sentences, from 0 to 5."""
    qqp: UpdatesSection | None = None
    """Whether two questions are paraphrases."""
    mnli: UpdatesSection | None = None
    """Whether a sentence entails another, contradicts it or neither; scored on the matched validation set (the training genres)."""
    qnli: UpdatesSection | None = None
    """Whether a sentence answers a question."""
    rte: UpdatesSection | None = None
    """Whether a sentence entails another."""


class GlueRecipe(TextSchema):
    """Fine-tuning of one model on GLUE; fixes everything except the machine."""

    name: NonBlank
    """Short name of the runs."""
    description: NonBlank
    """What the runs train, and for what purpose."""
    kind: Literal["glue"]
    """Recipe type."""
    source: NonBlank
    """Paper or script that the settings come from."""
    cost: NonBlank
    """Time and machine of all runs."""
    expected: NonBlank
    """Expected scores."""
    model: GlueModelSection
    """The encoder."""
    data: GlueDataSection
    """The data."""
    tasks: GlueTasksSection
    """Epochs, batch size, learning rate and other settings per task."""
    training: FineTuningSection
    """Optimiser, schedule, precision, logging and checkpoints."""

    def updates(self, task: TaskName) -> UpdatesSection | None:
        """Settings of a task; None if the recipe does not train it."""
        found: UpdatesSection | None = getattr(self.tasks, task)
        return found

    @property
    def trained(self) -> list[TaskName]:
        """Tasks of the recipe, in an order in which MNLI comes before the tasks that start from it."""
        named = [task for task in TASKS if self.updates(task) is not None]
        return sorted(named, key=lambda task: task in self.model.from_mnli)


def load_glue_recipe(path: str | Path, overrides: Sequence[str] = ()) -> GlueRecipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: Changes such as ``tasks.cola.epochs=1``, or ``tasks.qqp=`` to leave a task out; see
            `quiver.encoder.training.recipe_file.load_sections`.

    Raises:
        SchemaError: The recipe is invalid; lists all problems.
        InputError: The recipe does not exist or cannot be read.
    """
    recipe = load_sections(path, GlueRecipe, (), kinds=KINDS, overrides=overrides)
    problems = [] if recipe.trained else ["tasks: must name at least one task"]
    if MNLI in recipe.model.from_mnli:
        problems.append("model.from_mnli: MNLI cannot start from itself")
    if problems:
        raise SchemaError(str(path), problems)
    return recipe
