"""The recipe of a model's fine-tunings on GLUE: one file for the tasks, with what the paper chose for each.

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
"""Values of ``kind`` that make a recipe one of these."""

MNLI: TaskName = "mnli"
"""The task that others start from."""


class GlueModelSection(TextSchema):
    """The encoder."""

    init: NonBlank
    """Folder or hub id of an encoder with its tokenizer; of a model of sentence-transformers the encoder is taken."""
    pooling: Literal["mean", "cls"] | None = None
    """What stands for a sequence: its first token or the mean of its tokens; null for what config.json says."""
    from_mnli: tuple[TaskName, ...] = ()
    """Tasks that start from the model that was trained on MNLI, with a new matrix of labels. The paper: RTE, MRPC, STS-B."""


class GlueDataSection(TextSchema):
    """The examples. Paths are relative to the working directory."""

    source: NonBlank
    """``hub://OWNER/NAME[@REVISION]``, or a folder of the same layout, see `quiver.eval.nlu.glue_data`."""
    max_length: int = Field(default=256, ge=16)
    """Tokens of a text or a pair, special ones included; what is behind is cut. The release: 256."""
    limit: int | None = Field(default=None, ge=1)
    """Examples of a task that are trained on, the first of them; null for all."""


class GlueTasksSection(TextSchema):
    """What is chosen for each task; one that is left out is not trained."""

    cola: UpdatesSection | None = None
    """Whether a sentence is English as it is spoken."""
    sst2: UpdatesSection | None = None
    """Whether a review speaks well of a film."""
    mrpc: UpdatesSection | None = None
    """Whether two sentences of the news say the same."""
    stsb: UpdatesSection | None = None
    """How alike two sentences are, from 0 to 5."""
    qqp: UpdatesSection | None = None
    """Whether two questions ask the same."""
    mnli: UpdatesSection | None = None
    """Whether a sentence follows from another, contradicts it or neither; scored on the genres that it was trained on."""
    qnli: UpdatesSection | None = None
    """Whether a sentence answers a question."""
    rte: UpdatesSection | None = None
    """Whether a sentence follows from another."""


class GlueRecipe(TextSchema):
    """Fine-tunings of one model, fully determined but for the machine."""

    name: NonBlank
    """Short name of the runs."""
    description: NonBlank
    """What they train and what for."""
    kind: Literal["glue"]
    """Whose recipe this is."""
    source: NonBlank
    """Paper or script that the settings come from."""
    cost: NonBlank
    """Time and machine of all runs."""
    expected: NonBlank
    """Scores that they reach."""
    model: GlueModelSection
    """The encoder."""
    data: GlueDataSection
    """The examples."""
    tasks: GlueTasksSection
    """How many updates, of how many examples, at what rate, by task."""
    training: FineTuningSection
    """How they are trained, and what is kept on the way."""

    def updates(self, task: TaskName) -> UpdatesSection | None:
        """What is chosen for a task; None where it is not trained."""
        found: UpdatesSection | None = getattr(self.tasks, task)
        return found

    @property
    def trained(self) -> list[TaskName]:
        """The tasks that are trained, in an order in which each finds what it starts from."""
        named = [task for task in TASKS if self.updates(task) is not None]
        return sorted(named, key=lambda task: task in self.model.from_mnli)


def load_glue_recipe(path: str | Path, overrides: Sequence[str] = ()) -> GlueRecipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: ``tasks.cola.epochs=1``, ``tasks.qqp=`` to leave a task out, and the like, see
            `quiver.encoder.training.recipe_file.load_sections`.

    Raises:
        SchemaError: The recipe cannot be used; names everything that is wrong with it.
        InputError: There is no such recipe, or it cannot be read.
    """
    recipe = load_sections(path, GlueRecipe, (), kinds=KINDS, overrides=overrides)
    problems = [] if recipe.trained else ["tasks: must name at least one task"]
    if MNLI in recipe.model.from_mnli:
        problems.append("model.from_mnli: MNLI cannot start from itself")
    if problems:
        raise SchemaError(str(path), problems)
    return recipe
