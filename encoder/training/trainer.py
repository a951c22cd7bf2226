"""The training loop: forward, backward, clip, step; then log, save, evaluate and stop, in this order.

A `Task` gives batches, a loss and checkpoints; the trainer does the rest. The gradients are averaged over the processes once per step,
while the last backward pass runs (`quiver.encoder.training.sharding`). The host waits for the device once per step.

A checkpoint is saved before the evaluation of the same step, which stops between two batches when a signal asks for it: a process that is
killed while it evaluates loses nothing. A resumed run is the run that was not interrupted, on a CPU bit for bit.

Callbacks receive the steps and logged values: for a progress bar and for TensorBoard.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from quiver.encoder.errors import InputError, RunStoppedError
from quiver.encoder.packing import PackedBatch, copy_to
from quiver.encoder.progress import WorkStoppedError, interruptible, progress_bar
from quiver.encoder.training.processes import Processes, StepMemory, StopRequest, peak_memory
from quiver.encoder.training.run_folder import CHECKPOINTS, LOG, NONFINITE, Checkpoints, RunLog, keep_batches
from quiver.encoder.training.sharding import GradientReducer, whole_tensor
from quiver.encoder.training.state import preserve_rng_state, random_state, read_state, seed_random, set_random_state, write_state

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

STATE = "trainer"  # stem of the files of the train state in a checkpoint


@dataclass
class Progress:
    """How far a run has come; counts are over all processes and sessions."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # complete passes over the data
    epoch_batches: int = 0  # batches done in the current pass
    epoch_ends: list[int] = field(default_factory=list)  # steps in which a pass ended
    seconds: float = 0.0  # duration, evaluation and saving included
    tokens: int = 0  # tokens read
    counts: dict[str, int] = field(default_factory=dict)  # sums of the counts of `TrainingBatch`, by name
    window_updates: int = 0  # steps since the last log line
    window_loss: float = 0.0  # sum of their losses
    window_tokens: int = 0  # sum of their tokens
    window_counts: dict[str, int] = field(default_factory=dict)  # sums of their counts
    window_seconds: float = 0.0  # their duration, without evaluation and saving
    # Best scores so far, each with its step, best first; as many as `Task.keep_best`, at least one.
    best: list[tuple[float, int]] = field(default_factory=list)
    evaluated: int = 0  # last step after which the model was evaluated
    worse: int = 0  # evaluations since the best one
    activation_bytes: int = 0  # most memory that a step took on this process's GPU beyond weights and optimizer state; 0 on a CPU
    window_activation_bytes: int = 0  # the same since the last log line
    peak_memory_bytes: int = 0  # peak memory on this process's GPU in the steps so far, everything included; 0 without a GPU
    resumed_at: list[int] = field(default_factory=list)  # steps at which a session resumed the run

    @property
    def best_step(self) -> int | None:
        """Step with the best score so far."""
        return self.best[0][1] if self.best else None

    def totals(self) -> dict[str, Any]:
        """Totals for the record of a run; the peaks of memory are those of this process, on a CPU of this session alone."""
        peak = peak_memory()
        return {
            "steps": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "resumed_at": list(self.resumed_at),
            "peak_memory_bytes": None if peak is None else max(peak, self.peak_memory_bytes),
            **({"activation_bytes": self.activation_bytes} if self.activation_bytes else {}),
        }


@dataclass(frozen=True)
class TrainingBatch:
    """What goes through the model at once in this process."""

    # Input of the loss function: tensors and packed batches, which are moved to the model's device, and other values.
    inputs: Mapping[str, Any]
    examples: Iterable[dict[str, Any]]  # the rows as JSON, for the report on a non-finite loss; read only then
    tokens: int
    counts: Mapping[str, int] = field(default_factory=dict)  # other counts, by the names of `TrainerSettings.counts`
    # Number of terms that the loss is the mean of, such as masked tokens. The loss of a step is then the mean over the terms of all batches
    # and processes, and processes may have different numbers of batches. None: all batches of a step count equally, and every process has
    # as many.
    weight: int | None = None
    on_host: Collection[str] = ()  # names of inputs that stay on the host
    next_position: tuple[int, int] = (0, 0)  # epoch and number of batches done in it after this batch
    ends_epoch: bool = False  # whether it is the last batch of its epoch


class Task(Protocol):
    """What is trained. All methods are called in all processes, except where stated.

    The methods that take the progress are called after it has counted the step.
    """

    @property
    def module(self) -> nn.Module:
        """The trained module; it is in training mode while the loss is computed. `next_phase` may replace it."""

    @property
    def optimizer(self) -> Optimizer:
        """Over the weights of `module` that are trained."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    @property
    def learning_rate_setting(self) -> str:
        """Name of the current learning rate in the recipe, for error messages."""

    @property
    def keep_best(self) -> int:
        """Number of checkpoints with the best scores that are kept: one is saved whenever a score is among them."""

    def steps(self) -> Iterator[Sequence[TrainingBatch]]:
        """The remaining steps of the current phase, each as the batches of this process; the optimizer's learning rate is set."""

    def next_phase(self) -> bool:
        """Prepare the next phase after the last step of the current one; False if there is none."""

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Mean loss of a batch on this process, a scalar."""

    def backward_passes(self, inputs: Mapping[str, Any]) -> int:
        """Number of backward passes through the module that the loss of a batch runs: 1, or more with GradCache."""

    def after_step(self, step: int) -> None:
        """Called after the optimizer step, counted from 1: update schedules, averages and the position in the data."""

    def finished(self, progress: Progress) -> bool:
        """Whether this was the last step of the run."""

    def log_due(self, progress: Progress) -> bool:
        """Whether a log line is written after this step."""

    def learning_rate(self, step: int) -> float:
        """Learning rate of the step just done, counted from 1."""

    def position(self, progress: Progress) -> Mapping[str, float]:
        """Values that place a log line in the run, such as the epoch."""

    def log_values(self, progress: Progress) -> Mapping[str, float]:
        """Further values of a periodic log line, from the counts since the last one."""

    def evaluation_due(self, progress: Progress) -> bool:
        """Whether `evaluate` is called after this step."""

    def evaluate(self) -> Mapping[str, float]:
        """Measures on held-out data, the same in all processes; empty if there is none. The first decides which checkpoint is best.

        If a stop is requested (`quiver.encoder.progress.interruptible`) a WorkStoppedError is raised in all processes, or in none.
        """

    def save_due(self, progress: Progress) -> bool:
        """Whether a checkpoint is written after this step."""

    def save(self, folder: Path | None, progress: Progress, random_states: list[dict[str, Any]]) -> None:
        """Write the train state into an empty folder; ``folder`` is None in processes that write nothing."""

    def kept_steps(self, saved: list[int], progress: Progress) -> set[int]:
        """Steps whose checkpoints are kept after the one of ``progress.step`` was saved."""


class Callback:
    """Receives events of the loop; each method does nothing unless overridden."""

    def on_step(self, step: int) -> None:
        """Called after each optimizer step, once it is counted and before it is logged or saved."""

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Called with the values of each log line."""


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of the loop."""

    seed: int  # random seed of the run; rank r uses seed + r
    max_grad_norm: float = math.inf  # L2 norm to which gradients are clipped; infinity for no clipping
    counts: Sequence[str] = ()  # names of the counts of every `TrainingBatch`
    ranked_by: str | None = None  # measure that ranks the checkpoints; None for the first one of each evaluation
    lower_is_better: bool = False  # whether a lower score is a better one
    patience: int | None = None  # evaluations in a row without a new best score after which the run ends early; None for never
    callbacks: Sequence[Callback] = ()


class Trainer:
    """Trains a task from the step of ``progress``, which is updated in place, to the last one; writes into the run folder ``out``.

    The state of the task is that of the progress. Without ``random_states``, one per process, the random generators are seeded.
    """

    def __init__(
        self,
        task: Task,
        settings: TrainerSettings,
        out: Path,
        processes: Processes,
        stop: StopRequest,
        progress: Progress,
        random_states: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self._task, self._settings, self._out, self._processes, self._stop = task, settings, out, processes, stop
        self._log, self._checkpoints = RunLog(out / LOG), Checkpoints(out / CHECKPOINTS)
        self._random_states = random_states
        self.progress = progress
        self._reducer = GradientReducer((), processes)
        self._earlier = progress.seconds
        self._start = self._mark = time.perf_counter()

    def train(self) -> None:
        """Run the remaining steps. RunStoppedError: stopped on request, with a checkpoint; InputError: a non-finite loss or gradient."""
        task, settings, progress = self._task, self._settings, self.progress
        self._start = time.perf_counter()
        task.module.train()
        steps = self._steps()
        try:
            if self._random_states is None:
                seed_random(settings.seed + self._processes.rank)  # equal generators would drop the same units in all ranks
            else:
                set_random_state(self._random_states[self._processes.rank])
            if progress.step and progress.evaluated != progress.step and self._save_and_evaluate(saved=True):
                raise RunStoppedError(progress.step)  # the last session was stopped before it had evaluated, and so is this one
            while not self._is_patience_over() and (batches := next(steps, None)) is not None:
                grad_norm, stop = self._update(batches)
                for callback in self._settings.callbacks:
                    callback.on_step(progress.step)
                if task.log_due(progress):
                    self._write_window(grad_norm)
                stopped = stop and not task.finished(progress)
                if stopped:  # saved at once: the session that resumes the run evaluates
                    self._save()
                if stopped or self._save_and_evaluate(saved=False):
                    raise RunStoppedError(progress.step)
                self._mark = time.perf_counter()  # evaluation and saving do not count as time of the next step
        finally:
            self._reducer.close()
            task.module.eval()

    def _steps(self) -> Iterator[Sequence[TrainingBatch]]:
        """The remaining steps of all phases; the preparation of a phase does not count as time of its first step."""
        more = True
        while more:
            self._reducer.close()
            self._reducer = GradientReducer(self._weights, self._processes)
            steps = self._task.steps()
            self._mark = time.perf_counter()
            yield from steps
            more = self._task.next_phase()

    @property
    def _weights(self) -> list[nn.Parameter]:
        return [weight for weight in self._task.module.parameters() if weight.requires_grad]

    def _update(self, batches: Sequence[TrainingBatch]) -> tuple[float, bool]:
        """Forward and backward of all batches, then the optimizer step; the norm of the gradient, and whether a stop was requested."""
        task, processes, step = self._task, self._processes, self.progress.step + 1
        if callable(train := getattr(task.optimizer, "train", None)):  # schedule-free optimizers have two sets of weights
            train()
        memory = StepMemory(task.device)
        shares = self._shares(batches)
        losses = []
        for number, (batch, share) in enumerate(zip(batches, shares, strict=True), start=1):
            # Only for the time of its loss: what a batch keeps on the device would add up over the batches of a step.
            inputs = {name: self._move_input(name, value, batch) for name, value in batch.inputs.items()}
            if number == len(batches):
                self._reducer.begin(task.backward_passes(inputs))
            loss = task.loss(inputs) * share
            del inputs
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            losses.append(loss.detach())
        unused = self._reducer.finish()
        activations = memory.activations()
        norm = self._clip()
        names = self._settings.counts
        counts = [sum(batch.tokens for batch in batches), *(sum(batch.counts[name] for batch in batches) for name in names)]
        # The only wait for the device per step.
        values = self._read(losses, [norm, *unused.marks], [self._stop.is_requested, *counts])
        own, (grad_norm, *marks), (total, stop, tokens, *summed) = values
        mean = total / processes.size
        # Gradients and the mean loss are equal in all processes, so all of them raise, or none.
        if not (math.isfinite(mean) and math.isfinite(grad_norm)):
            unscaled = [value / float(share) if share else value for value, share in zip(own, shares, strict=True)]
            raise self._refuse(batches, unscaled, loss=mean, grad_norm=grad_norm)
        unused.drop(marks)
        task.optimizer.step()
        task.after_step(step)
        task.optimizer.zero_grad()
        self.progress.peak_memory_bytes = max(self.progress.peak_memory_bytes, memory.before)
        self._count_step(batches, mean, int(tokens), dict(zip(names, map(int, summed), strict=True)), activations)
        return grad_norm, stop > 0

    def _move_input(self, name: str, value: Any, batch: TrainingBatch) -> Any:
        if name in batch.on_host or not isinstance(value, Tensor | PackedBatch):
            return value
        return value.to(self._task.device) if isinstance(value, PackedBatch) else copy_to(self._task.device, value)[0]

    def _shares(self, batches: Sequence[TrainingBatch]) -> Sequence[float | Tensor]:
        """Factor of each batch's loss; the mean over the processes of the sums of the scaled losses is the loss of the step."""
        weights = [batch.weight for batch in batches if batch.weight is not None]
        if batches and not weights:
            return [1 / len(batches)] * len(batches)
        if self._processes.size == 1:
            return [weight / max(1.0, sum(weights)) for weight in weights]
        total = self._on_device([sum(weights)])
        distributed.all_reduce(total)  # the host does not need it
        share = self._processes.size / total.clamp_(min=1.0)
        return [(share[0] * weight).float() for weight in weights]

    def _read(
        self, losses: Sequence[Tensor], others: Sequence[Tensor], counts: Sequence[float]
    ) -> tuple[list[float], list[float], list[float]]:
        """Read the losses of this process, the other numbers, and, summed over the processes, the sum of losses and the counts."""
        device = self._task.device
        own = [value.detach().to(device, torch.float64).reshape(1) for value in (*losses, *others)]
        if self._processes.size == 1:
            read = torch.cat(own).tolist() if own else []
            return read[: len(losses)], read[len(losses) :], [sum(read[: len(losses)]), *counts]
        loss = torch.cat(own[: len(losses)]).sum(0, keepdim=True) if losses else self._on_device([0.0])
        summed = torch.cat([loss, self._on_device(counts)])
        distributed.all_reduce(summed)
        read = torch.cat([*own, summed]).tolist()
        return read[: len(losses)], read[len(losses) : len(own)], read[len(own) :]

    def _on_device(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(self._task.device, non_blocking=True)

    def _clip(self) -> Tensor:
        """Clip the gradients, and return their L2 norm before that."""
        highest = self._settings.max_grad_norm
        if math.isinf(highest):
            return whole_tensor(get_total_norm([weight.grad for weight in self._weights if weight.grad is not None]))
        return whole_tensor(clip_grad_norm_(self._weights, highest))

    def _refuse(self, batches: Sequence[TrainingBatch], own: list[float], *, loss: float, grad_norm: float) -> InputError:
        """Write the batches of the process with the non-finite loss; the error to raise."""
        step, processes = self.progress.step + 1, self._processes
        folder = self._out / NONFINITE / f"step-{step:06d}"
        if math.isfinite(loss) or not all(map(math.isfinite, own)):
            own_folder = folder if processes.size == 1 else folder / f"process-{processes.rank}"
            each = zip(batches, own, strict=True)
            seen = [(value, batch.examples, _tensors(batch.inputs)) for batch, value in each]
            keep_batches(own_folder, seen, step=step, grad_norm=grad_norm)
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {grad_norm}"
        remedy = f"check its texts, or lower {self._task.learning_rate_setting}"
        return InputError(f"{what} at step {step}; the batch was saved to {folder}: {remedy}")

    def _count_step(self, batches: Sequence[TrainingBatch], loss: float, tokens: int, counts: Mapping[str, int], activations: int) -> None:
        progress, now = self.progress, time.perf_counter()
        progress.step += 1
        if batches:
            progress.epoch, progress.epoch_batches = batches[-1].next_position
        if any(batch.ends_epoch for batch in batches):
            progress.epoch_ends.append(progress.step)
        progress.tokens += tokens
        progress.activation_bytes = max(progress.activation_bytes, activations)
        progress.window_activation_bytes = max(progress.window_activation_bytes, activations)
        progress.window_updates += 1
        progress.window_loss += loss
        progress.window_tokens += tokens
        for sums in (progress.counts, progress.window_counts):
            sums.update({name: sums.get(name, 0) + count for name, count in counts.items()})
        progress.window_seconds += now - self._mark
        progress.seconds = self._earlier + now - self._start

    def _save_and_evaluate(self, *, saved: bool) -> bool:
        """Save if a checkpoint is due and the step is not ``saved``, then evaluate if that is due; whether the run stops here."""
        task, progress = self._task, self.progress
        if not saved and task.save_due(progress):
            self._save()
            saved = True
        if not task.evaluation_due(progress):
            return False
        try:
            improved = self._evaluate()
        except WorkStoppedError:
            if not saved:
                self._save()
            return True
        if saved:  # this step may be the best one now, in place of another
            self._keep_checkpoints()
        elif improved and task.keep_best:
            self._save()
        return False

    def _is_patience_over(self) -> bool:
        patience, progress = self._settings.patience, self.progress
        if patience is None or progress.worse < patience:
            return False
        logger.info("stopped after step %d: the last %d scores were no better than the best", progress.step, progress.worse)
        return True

    def _write_window(self, grad_norm: float) -> None:
        progress = self.progress
        self._write(
            {
                "loss": progress.window_loss / progress.window_updates,
                "learning_rate": self._task.learning_rate(progress.step),
                "grad_norm": grad_norm,
                "tokens_per_second": progress.window_tokens / progress.window_seconds,
                **({"activation_bytes": progress.window_activation_bytes} if progress.window_activation_bytes else {}),
                **self._task.log_values(progress),
            }
        )
        progress.window_updates = progress.window_tokens = progress.window_activation_bytes = 0
        progress.window_loss = progress.window_seconds = 0.0
        progress.window_counts = {}

    def _write(self, values: Mapping[str, float]) -> None:
        progress = self.progress
        for callback in self._settings.callbacks:
            callback.on_log(progress.step, values)
        if self._processes.is_main_process:
            self._log.append({"step": progress.step, **self._task.position(progress), **values, "seconds": progress.seconds})

    def _evaluate(self) -> bool:
        """Log the measures; whether the one that ranks is among the best that are kept. After a stop request the progress is as before."""
        progress, task = self.progress, self._task
        measures = self._logged_measures()
        logged = bool(measures)
        if not logged:
            with preserve_rng_state(), interruptible(lambda: self._stop.is_requested):
                measures = dict(task.evaluate())
                task.module.train()
        progress.seconds = self._earlier + time.perf_counter() - self._start
        progress.evaluated = progress.step
        if not measures:
            return False
        if not logged:
            self._write(measures)
        key = self._settings.ranked_by or next(iter(measures))
        if key not in measures:
            return False
        score = measures[key]
        if not math.isfinite(score):
            logger.warning("step %d: %s is %s, which is not compared with other scores", progress.step, key, score)
            progress.worse += 1
            return False
        sign = 1 if self._settings.lower_is_better else -1
        ranked = sorted([*progress.best, (score, progress.step)], key=lambda one: (sign * one[0], one[1]))  # the first of equals wins
        progress.best = ranked[: max(1, self._task.keep_best)]
        progress.worse = 0 if progress.best_step == progress.step else progress.worse + 1
        return (score, progress.step) in progress.best

    def _logged_measures(self) -> dict[str, float]:
        """Measures of this step that an earlier session has logged before it was killed; empty without one."""
        progress = self.progress
        if not progress.resumed_at or progress.resumed_at[-1] != progress.step:
            return {}
        position, is_main = self._task.position(progress), self._processes.is_main_process
        return self._processes.gather(self._log.measures(progress.step, position) if is_main else {})[0]

    def _save(self) -> None:
        progress = self.progress
        states = self._processes.gather(random_state())
        progress.seconds = self._earlier + time.perf_counter() - self._start
        with preserve_rng_state():  # a task may make a model to save
            if not self._processes.is_main_process:
                self._task.save(None, progress, states)
                return
            self._log.sync()
            with self._checkpoints.writing(progress.step) as folder:
                self._task.save(folder, progress, states)
        self._keep_checkpoints()
        logger.info("checkpoint of step %d saved", progress.step)

    def _keep_checkpoints(self) -> None:
        if self._processes.is_main_process:
            self._checkpoints.keep(self._task.kept_steps(self._checkpoints.steps(), self.progress))


def prefetch(items: Iterator[Item]) -> Iterator[Item]:
    """The items, each made by a thread while the one before it is used."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
        coming: Future[Any] = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield item


def save_train_state(folder: Path, state: Mapping[str, Any], progress: Progress, random_states: list[dict[str, Any]]) -> None:
    """Write the train state beside the model of a checkpoint: ``trainer.json`` and ``trainer.safetensors``."""
    write_state(folder / STATE, {**state, "random": random_states, "progress": asdict(progress)})


@dataclass(frozen=True)
class SavedState:
    """The train state of a checkpoint, see `save_train_state`."""

    state: Mapping[str, Any]
    progress: Progress
    random_states: list[dict[str, Any]]


def load_train_state(folder: Path, names: Collection[str]) -> SavedState:
    """Read what `save_train_state` has written; tensors are on the CPU."""
    state: dict[str, Any] = read_state(folder / STATE)
    reason = next((f"it has no {name}" for name in (*names, "random", "progress") if name not in state), None)
    if reason is None and set(state["progress"]) != {one.name for one in fields(Progress)}:
        reason = "its progress has other fields"
    if reason is not None:
        raise InputError(f"{folder}: written by another version of Quiver or torch ({reason}); start the run again")
    return SavedState(state, Progress(**state["progress"]), state["random"])


def _tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of a loss as tensors: of a packed batch those that rebuild it, of other sequences their numbers."""
    packed = [value for value in inputs.values() if isinstance(value, PackedBatch)]
    found = {**inputs, **{name: getattr(batch, name) for batch in packed for name in ("ids", "cu_seqlens", "key_lengths")}}
    return {name: torch.tensor(value) if isinstance(value, tuple) else value for name, value in found.items()}


FORMS: Mapping[str, str] = {"loss": "loss {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
"""Log key -> format of the value on a progress bar."""


class BarCallback(Callback):
    """Shows progress and the logged values that have a format on a progress bar; ``position`` is that of the bar after a step."""

    def __init__(self, advance: Callable[[int, str], None], done: int, forms: Mapping[str, str], position: Callable[[int], int]) -> None:
        self._advance, self._done, self._forms, self._position = advance, done, forms, position
        self._latest: dict[str, float] = {}

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values."""
        self._latest.update(values)
        self.on_step(step)

    def on_step(self, step: int) -> None:
        """Advance the bar."""
        before, self._done = self._done, self._position(step)
        news = (form.format(self._latest[key]) for key, form in self._forms.items() if key in self._latest)
        self._advance(self._done - before, ", ".join(news))


@contextmanager
def training_bar(
    done: int,
    total: int,
    *,
    enabled: bool,
    forms: Mapping[str, str] = FORMS,
    unit: str = "step",
    position: Callable[[int], int] = lambda step: step,
) -> Iterator[BarCallback]:
    """Show progress on standard error while the block runs, from ``done`` to ``total``."""
    with progress_bar(unit, total, enabled=enabled, done=done) as advance:
        yield BarCallback(advance, done, forms, position)


class TensorBoard(Callback):
    """Writes logged values as scalars."""

    def __init__(self, writer: Any = None, names: Mapping[str, str] | None = None) -> None:
        self._writer = writer
        self._names = names or {}

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(self._names.get(name, f"training/{name}"), value, step)


@contextmanager
def tensorboard(folder: Path, *, step: int, enabled: bool, names: Mapping[str, str] | None = None) -> Iterator[TensorBoard]:
    """A TensorBoard callback for the block; it writes nothing where TensorBoard is not installed."""
    if not enabled or importlib.util.find_spec("tensorboard") is None:
        yield TensorBoard()
        return
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=step)
    try:
        yield TensorBoard(writer, names)
    finally:
        writer.close()
