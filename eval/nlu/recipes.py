"""Recipes of fine-tuning on GLUE and for span question answering: meaning, unit and bounds of each field.

Source: BERT, arXiv:1810.04805, section 4.2 and appendix A.3, for the usual values; ModernBERT, arXiv:2412.13663, appendix E.1 and Table 6,
and the fine-tuning jobs of its release for GLUE; Jeong et al., HCLT 2023, for longer positions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from quiver.encoder.schema import Field, NonBlank, Rule, SchemaError, TextSchema
from quiver.encoder.training.recipe_file import Overrides, RecipeSchema, TrainingDtype, load_sections
from quiver.eval.nlu.answers import Official
from quiver.eval.nlu.glue_tasks import TASKS, TaskName
from quiver.eval.nlu.questions import WindowSettings


class UpdatesSection(TextSchema):
    """Settings that are chosen per task: epochs, batch size, learning rate, evaluation."""

    epochs: float = Field(gt=0)
    """Number of passes over all examples, unless the run stops early."""
    batch_size: int = Field(ge=1)
    """Examples per update."""
    learning_rate: float = Field(gt=0, le=1)
    """Peak learning rate; BERT: 2e-5 to 5e-5."""
    weight_decay: float = Field(default=0.01, ge=0, le=1)
    """Weight decay of matrices and embeddings; norms and biases have none. ``training.decoupled_decay`` selects its scaling."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Updates between evaluations, each with a checkpoint; null for the end of each epoch. The last update always has both."""


class FineTuningSection(TextSchema):
    """Optimiser, schedule, dtype, logging and checkpoints."""

    warmup_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the updates in which the learning rate rises from zero; it then falls linearly to zero."""
    decoupled_decay: bool = False
    """Scaling of the weight decay. False, as in AdamW: ``weight_decay`` times the learning rate. True, as in the optimiser of ModernBERT's
    release: ``weight_decay`` times the learning rate's share of its peak."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """L2 norm to which gradients are clipped; null for no clipping."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay rate of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay rate of the running mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon, added to the root of the mean of squares."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row without improvement; null to run to the end. Does not change the schedule."""
    seed: int = Field(default=12, ge=0, le=2**32 - 1)
    """Random seed of the head's weights, the order of the examples and dropout."""
    dtype: TrainingDtype = "auto"
    """Dtype of the forward and backward pass (``bfloat16``: autocast); weights, gradients and optimizer state are float32. ``auto``:
    bfloat16 on a GPU of compute capability 8.0 and above, otherwise float32; a resumed run keeps the dtype that it began with."""
    log_every: int = Field(default=10, ge=1)
    """Updates between lines of the log."""
    save_every: int | None = Field(default=None, ge=1)
    """Updates between checkpoints, in addition to those at evaluations; null for none."""
    keep_checkpoints: int = Field(default=1, ge=1)
    """Number of newest checkpoints to keep, in addition to the best one."""


GLUE_KINDS = ("glue",)
"""Values of ``kind`` that select this recipe type."""

MNLI: TaskName = "mnli"
"""Task whose model other tasks may start from."""


class GlueModelSection(TextSchema):
    """The encoder of a GLUE recipe."""

    init: NonBlank
    """Folder or hub id of an encoder with its tokenizer; of a sentence-transformers model, the encoder is used."""
    revision: NonBlank | None = None
    """Branch, tag or commit of ``init`` on the Hub; run.json has the commit that was read."""
    pooling: Literal["mean", "cls"] | None = None
    """Pooling of the token vectors: ``cls`` (first token) or ``mean``; null for the setting in config.json."""
    from_mnli: tuple[TaskName, ...] = ()
    """Tasks that start from the model trained on MNLI, with a new output layer. The paper: RTE, MRPC, STS-B."""
    mnli: NonBlank | None = None
    """Run folder of MNLI whose model they start from; null for the one beside them."""


class GlueDataSection(TextSchema):
    """The GLUE data of a recipe. Paths are relative to the working directory."""

    source: NonBlank
    """``hub://OWNER/NAME[@REVISION]``, or a folder with the same layout, see `quiver.eval.nlu.glue_tasks`."""
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


class GlueRecipe(RecipeSchema):
    """Fine-tuning of one model on GLUE; fixes everything except the machine."""

    kind: Literal["glue"]
    """Recipe type."""
    model: GlueModelSection
    """The encoder."""
    data: GlueDataSection
    """The data."""
    tasks: GlueTasksSection
    """Epochs, batch size, learning rate and other settings per task."""
    training: FineTuningSection
    """Optimiser, schedule, dtype, logging and checkpoints."""

    def updates(self, task: TaskName) -> UpdatesSection | None:
        """Settings of a task; None if the recipe does not train it."""
        found: UpdatesSection | None = getattr(self.tasks, task)
        return found

    @property
    def trained(self) -> list[TaskName]:
        """Tasks of the recipe, in an order in which MNLI comes before the tasks that start from it."""
        named = [task for task in TASKS if self.updates(task) is not None]
        return sorted(named, key=lambda task: task in self.model.from_mnli)


def load_glue_recipe(path: str | Path, overrides: Overrides = ()) -> GlueRecipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: Changes such as ``tasks.cola.epochs=1``, or ``tasks.qqp=`` to leave a task out; see
            `quiver.encoder.training.recipe_file.load_sections`.
    """
    recipe = load_sections(path, GlueRecipe, (), kinds=GLUE_KINDS, overrides=overrides)
    problems = [] if recipe.trained else ["tasks: must name at least one task"]
    if MNLI in recipe.model.from_mnli:
        problems.append("model.from_mnli: MNLI cannot start from itself")
    if problems:
        raise SchemaError(str(path), problems)
    return recipe


QA_KINDS = ("span_qa",)
"""Values of ``kind`` that select this recipe type."""


class QaModelSection(TextSchema):
    """The encoder of a question answering recipe."""

    init: NonBlank
    """Folder or hub id of an encoder with its tokenizer, or of a span question answering model; of a sentence-transformers model, the
    encoder is used."""
    revision: NonBlank | None = None
    """Branch, tag or commit of ``init`` on the Hub; run.json has the commit that was read."""
    extend_positions: int = Field(default=1, ge=1)
    """Factor by which the absolute positions are extended before training; 1 for no extension."""
    attention_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout of the attention weights in training; null for the model's own."""


class QaDataSection(TextSchema):
    """The questions, in SQuAD's JSON format. Paths are relative to the working directory."""

    train: NonBlank
    """File of the training questions."""
    test: NonBlank | None = None
    """File of the test questions, which are answered after training; may be the same file. Required unless ``split`` has three parts."""
    split: NonBlank | None = None
    """Parts into which the questions of ``train`` are divided: ``9:1`` for training and development questions, ``8:1:1`` for test questions
    too; null for no division. The parts depend on the questions' ids only."""
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

    @property
    def shares(self) -> tuple[int, ...]:
        """The numbers of ``split``; empty without one."""
        return tuple(map(int, self.split.split(":"))) if self.split else ()


class QaRecipe(RecipeSchema):
    """Recipe of one fine-tuning; fixes everything except the machine."""

    kind: Literal["span_qa"]
    """Recipe type."""
    model: QaModelSection
    """The encoder."""
    data: QaDataSection
    """The questions."""
    windows: WindowSettings
    """Lengths of the windows into which paragraphs are split."""
    updates: UpdatesSection
    """Epochs, batch size (in windows), learning rate and evaluation."""
    training: FineTuningSection
    """Optimiser, schedule, dtype, logging and checkpoints."""


QA_RULES = (
    Rule(
        ("windows.overlap", "windows.max_answer_length", "windows.paragraphs"),
        lambda overlap, longest, paragraphs: overlap < longest and paragraphs == "overlap",
        "must be >= {1}, max_answer_length, so that no answer is cut; got {0}",
    ),
    Rule(
        ("training.patience", "data.development", "data.split"),
        lambda patience, development, split: patience is not None and development is None and split is None,
        "requires data.development or data.split",
    ),
    Rule(
        ("data.split",),
        lambda split: split is not None and re.fullmatch(r"[1-9]\d{0,3}(:[1-9]\d{0,3}){1,2}", split) is None,
        "must be two or three numbers such as 9:1 (training, development) or 8:1:1 (and test), got {0!r}",
    ),
    Rule(
        ("data.development", "data.split"),
        lambda development, split: development is not None and split is not None,
        "is a part of data.split; leave one of the two out",
    ),
    Rule(
        ("data.test", "data.split"),
        lambda test, split: test is None and (split or "").count(":") < 2,
        "names the file of the test questions; or divide data.train by data.split=8:1:1",
    ),
    Rule(
        ("data.test", "data.split"),
        lambda test, split: test is not None and (split or "").count(":") == 2,
        "is a part of data.split: {1}; leave it out (data.test=), or divide into two parts",
    ),
    Rule(
        ("data.development_split", "data.development"),
        lambda split, development: split is not None and development is None,
        "requires data.development",
    ),
)


def load_qa_recipe(path: str | Path, overrides: Overrides = ()) -> QaRecipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: Changes such as ``updates.epochs=1``, see `quiver.encoder.training.recipe_file.load_sections`.
    """
    return load_sections(path, QaRecipe, QA_RULES, kinds=QA_KINDS, overrides=overrides)
