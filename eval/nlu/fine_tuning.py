"""Fine-tuning of an encoder with a head: a task of the trainer, the run folder, the best model, and the record of the run.

A task has examples, a loss and a score. The trainer learns it by AdamW with linear warm-up and decay, writes checkpoints, and stops early.
The run folder is described in `quiver.encoder.training.run_folder`; it also holds the results of the task. A session can be interrupted
at any point: the folder then holds the run at its last checkpoint. A resumed run ends with the same weights as an uninterrupted one, bit
for bit on a CPU.

Sources: AdamW, arXiv:1711.05101; BERT, arXiv:1810.04805, appendix A.2, for the schedule. Weight decay scaled by the learning rate's share
of its peak: section 3 of the AdamW paper, and Composer's DecoupledAdamW, which ModernBERT's release uses for fine-tuning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quiver.encoder.checkpoints.checkpoint import local_folder
from quiver.encoder.errors import InputError
from quiver.encoder.heads import SequenceClassifier, SpanQA
from quiver.encoder.packing import PackedBatch
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training import optimization
from quiver.encoder.training.optimization import OptimizerSettings, autocast
from quiver.encoder.training.processes import Processes, current_device, exact_float32, keep_freed_memory, stop_requests
from quiver.encoder.training.run_folder import (
    CHECKPOINTS,
    LOG,
    RECORD,
    Checkpoints,
    RunIdentity,
    describe_session,
    finish_run,
    lock_run,
    new_run,
    read_log,
    refuse_existing,
    refuse_nothing_to_resume,
    refuse_other_run,
    remove_leftovers,
    resume_run,
    training_curves,
)
from quiver.encoder.training.state import preserve_rng_state
from quiver.encoder.training.trainer import (
    FORMS,
    Progress,
    Trainer,
    TrainerSettings,
    TrainingBatch,
    load_train_state,
    prefetch,
    save_train_state,
    training_bar,
)
from quiver.eval.nlu.recipes import FineTuningSection, UpdatesSection
from quiver.retrieval.models.pretrained import check_device, default_device, read_model_folder

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Model = TypeVar("Model", SequenceClassifier, SpanQA)
Example = TypeVar("Example")

SCORE = "score"
"""Log key of the measure that decides which checkpoint is best."""

_PACKED = "packed"


@dataclass(frozen=True)
class TaskBatch:
    """A batch of examples.

    Attributes:
        packed: Tokens of the examples.
        targets: Targets of the loss by name, one row per example.
    """

    packed: PackedBatch
    targets: Mapping[str, Tensor]


class Task(Protocol[Model, Example]):
    """Examples to learn from, with their loss and score."""

    @property
    def examples(self) -> Sequence[Example]:
        """Training examples, at least one."""

    def batch(self, examples: Sequence[Example]) -> TaskBatch:
        """Put examples into one batch, in their order."""

    def loss(self, model: Model, batch: TaskBatch) -> Tensor:
        """The mean loss of a batch on the model's device, a float32 scalar."""

    def score(self, model: Model) -> Mapping[str, float]:
        """Measures on held-out examples, higher is better; the first decides which checkpoint is best. Empty if there are none.

        The model is in training mode before and after.
        """

    def described(self, example: Example) -> dict[str, Any]:
        """An example as JSON, for the report on a non-finite loss."""

    def save(self, model: Model, folder: Path) -> None:
        """Save the model and its tokenizer in the usual format."""

    def open(self, folder: Path) -> Model:
        """Load a model saved by `save`, in evaluation mode, on the CPU."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a run and the examples of each."""

    updates: UpdatesSection
    training: FineTuningSection
    setting: str
    examples: int

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return math.ceil(self.examples / self.updates.batch_size)

    @property
    def steps(self) -> int:
        """Steps of the whole run, at least one."""
        return max(1, round(self.per_epoch * self.updates.epochs))

    def members(self, step: int) -> list[int]:
        """Row numbers of the examples of a step, from 1: each example once per epoch, in an order drawn by seed and epoch.

        Example:
            >>> updates = UpdatesSection(epochs=2, batch_size=2, learning_rate=1e-3)
            >>> schedule = Schedule(updates, FineTuningSection(), "updates", examples=3)
            >>> sorted(schedule.members(1) + schedule.members(2)), len(schedule.members(2)), schedule.steps
            ([0, 1, 2], 1, 4)
        """
        epoch, position = divmod(step - 1, self.per_epoch)
        order = np.random.default_rng([self.training.seed, epoch]).permutation(self.examples)
        first = position * self.updates.batch_size
        return [int(member) for member in order[first : first + self.updates.batch_size]]

    def evaluation_due(self, step: int) -> bool:
        """Whether the model is evaluated and saved after a step."""
        return step > 0 and (step == self.steps or step % (self.updates.evaluate_every or self.per_epoch) == 0)

    def learning_rate(self, step: int) -> float:
        """Learning rate of a step, from 1."""
        return self.updates.learning_rate * learning_rate_share(step, self.steps, warmup_ratio=self.training.warmup_ratio)


def learning_rate_share(step: int, steps: int, *, warmup_ratio: float) -> float:
    """Share of the peak learning rate in a step.

    Example:
        >>> [learning_rate_share(step, 6, warmup_ratio=0.3) for step in range(1, 7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = math.ceil(steps * warmup_ratio)
    done = step if step <= warmup else step - 1  # the rate rises from the first step, and is still at its peak after the warm-up
    return optimization.learning_rate_share(done, warmup=warmup, decay_start=warmup, total=steps)


def make_optimizer(model: nn.Module, updates: UpdatesSection, training: FineTuningSection) -> Optimizer:
    """AdamW over all weights of a model; matrices decay, vectors (norms, biases) do not."""
    # AdamW subtracts learning rate x decay. Dividing the decay by the peak rate gives decay x (share of the peak).
    decay = updates.weight_decay / updates.learning_rate if training.decoupled_decay else updates.weight_decay
    settings = OptimizerSettings("adamw", updates.learning_rate, decay, training.beta1, training.beta2, training.eps)
    return optimization.make_optimizer(settings, model.parameters())


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all weights."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


Result = TypeVar("Result", bound="DataclassInstance")

RUN_SCHEMA = "quiver-run/fine-tuning-1"
"""Schema of ``run.json``."""


@dataclass(frozen=True)
class Prepared(Generic[Model, Example, Result]):
    """A run whose input has been read.

    Attributes:
        task: The task to learn.
        schedule: Steps and learning rates.
        inputs: Values that must be equal in a resumed session, as JSON: checksums of the data and of the initial model.
        counts: Counts for the record, as JSON.
        first_model: Returns the initial model.
        finish: Scores the trained model and writes the results into the run folder.
    """

    task: Task[Model, Example]
    schedule: Schedule
    inputs: Mapping[str, Any]
    counts: Mapping[str, Any]
    first_model: Callable[[], Model]
    finish: Callable[[Model], Result]


@dataclass(frozen=True)
class Request:
    """A request to fine-tune a model.

    Attributes:
        recipe: Resolved recipe, as JSON.
        out: Run folder.
        results: Names of the files that ``finish`` writes there.
        resume: Resume the unfinished run in ``out`` from its last checkpoint, or from the beginning if it has none.
        overwrite: Replace an earlier run in ``out``.
        progress: Show progress bars.
        command: Command line to record.
        device: Device to train on; None for a GPU if available.
    """

    recipe: Mapping[str, Any]
    out: Path
    results: Sequence[str]
    resume: bool = False
    overwrite: bool = False
    progress: bool = False
    command: str | None = None
    device: str | None = None

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of the run."""
        return Checkpoints(self.out / CHECKPOINTS)


class _TrainerTask(Generic[Model, Example]):
    """Adapts a `Task` to the trainer."""

    def __init__(self, task: Task[Model, Example], schedule: Schedule, model: Model, done: int) -> None:
        self._task: Task[Model, Example] = task
        self._schedule = schedule
        self.model: Model = model
        self.optimizer = make_optimizer(model, schedule.updates, schedule.training)
        self.device = next(model.parameters()).device
        self._done = done
        self.after_step(done)

    @property
    def module(self) -> nn.Module:
        return self.model

    @property
    def learning_rate_setting(self) -> str:
        return f"{self._schedule.setting}.learning_rate"

    @property
    def keep_best(self) -> int:
        return 0  # every evaluated step is saved

    def steps(self) -> Iterator[list[TrainingBatch]]:
        return prefetch(self._steps())

    def _steps(self) -> Iterator[list[TrainingBatch]]:
        task, schedule = self._task, self._schedule
        for step in range(self._done + 1, schedule.steps + 1):
            examples = [task.examples[row] for row in schedule.members(step)]
            batch = task.batch(examples)
            yield [
                TrainingBatch(
                    {_PACKED: batch.packed, **batch.targets},
                    map(task.described, examples),
                    tokens=batch.packed.num_tokens,
                    next_position=divmod(step, schedule.per_epoch),
                    ends_epoch=step % schedule.per_epoch == 0,
                )
            ]

    def next_phase(self) -> bool:
        return False

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        batch = TaskBatch(inputs[_PACKED], {name: value for name, value in inputs.items() if name != _PACKED})
        with autocast(self._schedule.training.dtype, self.device):
            return self._task.loss(self.model, batch)

    def backward_passes(self, inputs: Mapping[str, Any]) -> int:
        del inputs
        return 1

    def learning_rate(self, step: int) -> float:
        return self._schedule.learning_rate(step)

    def after_step(self, step: int) -> None:
        if step < self._schedule.steps:
            set_learning_rate(self.optimizer, self.learning_rate(step + 1))

    def finished(self, progress: Progress) -> bool:
        return progress.step == self._schedule.steps

    def log_due(self, progress: Progress) -> bool:
        return self.finished(progress) or progress.step % self._schedule.training.log_every == 0

    def position(self, progress: Progress) -> Mapping[str, float]:
        return {"epoch": progress.epoch + progress.epoch_batches / self._schedule.per_epoch}

    def log_values(self, progress: Progress) -> Mapping[str, float]:
        del progress
        return {}

    def evaluation_due(self, progress: Progress) -> bool:
        return self._schedule.evaluation_due(progress.step)

    def evaluate(self) -> Mapping[str, float]:
        with autocast(self._schedule.training.dtype, self.device):
            measures = self._task.score(self.model)
        return {SCORE: next(iter(measures.values())), **measures} if measures else {}

    def save_due(self, progress: Progress) -> bool:
        every = self._schedule.training.save_every
        return self.evaluation_due(progress) or (every is not None and progress.step % every == 0)

    def save(self, folder: Path | None, progress: Progress, random_states: list[dict[str, Any]]) -> None:
        if folder is not None:
            self._task.save(self.model, folder)
            save_train_state(folder, {"optimizer": self.optimizer.state_dict()}, progress, random_states)

    def kept_steps(self, saved: list[int], progress: Progress) -> set[int]:
        newest = set(saved[-self._schedule.training.keep_checkpoints :])
        return newest if progress.best_step is None else newest | {progress.best_step}


def fine_tune(
    request: Request, prepared: Prepared[Model, Example, Result], first_model: Callable[[], Model], *, step: int | None
) -> tuple[Progress, Model]:
    """Train until the end of the run, or until the score has not risen for ``patience`` evaluations."""
    schedule, checkpoint = prepared.schedule, request.checkpoints.path(step or 0)
    with stop_requests() as stop:  # a signal that arrives while the model is loaded stops the run too, after its first step
        model: Model = (prepared.task.open(checkpoint) if step else first_model()).to(_pick_device(request))
        task = _TrainerTask(prepared.task, schedule, model, step or 0)
        progress, random_states = Progress(), None
        if step:
            saved = load_train_state(checkpoint, ("optimizer",))
            progress, random_states = saved.progress, saved.random_states
            task.optimizer.load_state_dict(saved.state["optimizer"])
        if step is not None:
            progress.resumed_at.append(step)
        training = schedule.training
        forms = {**FORMS, SCORE: "score {:.4f}"}
        with training_bar(progress.step, schedule.steps, enabled=request.progress, forms=forms) as bar:
            highest = math.inf if training.max_grad_norm is None else training.max_grad_norm
            settings = TrainerSettings(training.seed, highest, patience=training.patience, callbacks=[bar])
            Trainer(task, settings, request.out, Processes(), stop, progress, random_states).train()
    return progress, model.eval()


def run_fine_tuning(request: Request, prepare: Callable[[], Prepared[Model, Example, Result]]) -> Result:
    """Fine-tune a model, and write the model, the results and the record."""
    if request.resume and request.overwrite:
        raise InputError("--resume and --overwrite exclude each other; pass only one of them")
    out = request.out
    with current_device(_pick_device(request)), preserve_rng_state(), keep_freed_memory(), exact_float32(), lock_run(out):
        if request.resume:
            refuse_nothing_to_resume(out)
            refuse_other_run(out, _identify_run(request, {}))
        else:
            refuse_existing(out, overwrite=request.overwrite)
        prepared = prepare()
        now = _identify_run(request, prepared.inputs)
        room: AbstractContextManager[None] = nullcontext() if request.resume else new_run(out)
        try:
            with room:
                return _train(request, prepared, now)
        finally:
            if not (out / RECORD).exists():  # remove results of an earlier run in this folder
                for name in request.results:
                    (out / name).unlink(missing_ok=True)


def _identify_run(request: Request, inputs: Mapping[str, Any]) -> RunIdentity:
    return RunIdentity(request.recipe, inputs, describe_session(request.command, _pick_device(request)))


def _pick_device(request: Request) -> str:
    return check_device(request.device or default_device())


def _train(request: Request, prepared: Prepared[Model, Example, Result], now: RunIdentity) -> Result:
    out = request.out
    step = resume_run(out, now, Processes()) if request.resume else None
    if step is None:
        now.write(out)
    progress, model = fine_tune(request, prepared, prepared.first_model, step=step)
    if progress.best_step not in (None, progress.step):
        best = request.checkpoints.path(progress.best_step or 0)
        if not request.checkpoints.sound([progress.best_step or 0]):
            raise InputError(f"{best}: the best checkpoint is damaged or missing; train again with --overwrite")
        model = prepared.task.open(best).to(_pick_device(request))
    with autocast(prepared.schedule.training.dtype, torch.device(_pick_device(request))):
        scores = prepared.finish(model)
    parts = {
        "counts": prepared.counts,
        "model": {"parameters": sum(weight.numel() for weight in model.parameters())},
        "result": _summarize_run(read_log(out / LOG), prepared.schedule, progress),
        "scores": asdict(scores),
    }
    finish_run(out, partial(prepared.task.save, model), now.record(RUN_SCHEMA, parts))
    return scores


def _summarize_run(log: Sequence[Mapping[str, float]], schedule: Schedule, progress: Progress) -> dict[str, Any]:
    """Summary of the run, from its log and its final progress."""
    about = ("epoch", "seconds")
    return {
        **progress.totals(),
        **training_curves(log),
        "planned_steps": schedule.steps,
        "epochs": progress.step / schedule.per_epoch,
        "stopped_early": progress.step < schedule.steps,
        "best_step": progress.best_step,
        "development": [{key: value for key, value in line.items() if key not in about} for line in log if SCORE in line],
    }


def finished(out: Path) -> bool:
    """Whether the folder holds a complete run; also removes files left by a session that was killed at the end of training."""
    if not (out / RECORD).is_file():
        return False
    remove_leftovers(out)
    return True


TYPES = "token_type_ids"
INPUTS = ["input_ids", "attention_mask"]
"""Inputs that transformers passes to the model; by default it passes `TYPES` too."""


def encoder_folder(source: str | Path) -> Path:
    """Folder with the encoder's weights, downloaded from the Hugging Face Hub if necessary.

    Of a sentence-transformers model, it is the folder of its encoder.
    """
    folder = local_folder(source)
    return read_model_folder(folder).encoder_folder if (folder / "modules.json").is_file() else folder


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save the tokenizer of a model that was fine-tuned without token types, with settings that tell transformers not to pass any."""
    tokenizer.settings["model_input_names"] = list(INPUTS)
    tokenizer.save(folder)
