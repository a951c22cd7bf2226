"""Train a recipe from start to end, or resume it: data, model, training loop, run record.

A process may be killed at any instruction: the run folder (`quiver.encoder.training.run_folder`) then holds the run as of its last
checkpoint. A resumed run ends with the weights of one that was not interrupted, on a CPU bit for bit.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json
from quiver.encoder.lora import add_lora
from quiver.encoder.progress import WorkStoppedError
from quiver.encoder.training import run_folder
from quiver.encoder.training.optimization import autocast, require_optimizer, with_training_dtype
from quiver.encoder.training.processes import Processes, stop_requests
from quiver.encoder.training.recipe_file import WITHOUT_WEIGHT
from quiver.encoder.training.run_folder import (
    CHECKPOINTS,
    DATA,
    LOG,
    RECORD,
    START,
    TENSORBOARD,
    Checkpoints,
    Line,
    RunIdentity,
    read_log,
    session_environment,
    training_curves,
)
from quiver.encoder.training.trainer import FORMS, Callback, Progress, Trainer, TrainerSettings, TrainingBatch, tensorboard, training_bar
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.pretrained import check_device, default_device
from quiver.retrieval.training.data import TrainingRows, prepare_rows
from quiver.retrieval.training.dataloader import BatchOrder, Collator, DataLoader
from quiver.retrieval.training.model import build_model, require_extra
from quiver.retrieval.training.recipe import IN_BATCH, PART_SCORE, SCORE, Recipe
from quiver.retrieval.training.state import (
    Schedule,
    TrainState,
    average_models,
    learning_rate_share,
    load_trainable,
    make_optimizer,
    read_checkpoint,
    shard,
    write_checkpoint,
)

if TYPE_CHECKING:  # imports the libraries of the extra
    from quiver.retrieval.training.losses import RetrievalLoss

__all__ = ["Scorer", "check_rows", "train", "train_and_save"]

logger = logging.getLogger(__name__)

COUNTS = ("texts", "truncated")  # names of the counts of a batch: texts, and texts that were truncated
SCHEMA = "quiver-run/2"  # schema of ``run.json``

Model: TypeAlias = BiEncoder | ColBERT

Scorer: TypeAlias = Callable[[Model], float | Mapping[str, float]]
"""Returns a model's score on the development collection, or the score on each of several; higher is better, and the mean counts."""


def train(  # noqa: PLR0913  # each is an option of the command, or added by a caller
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
    scorer: Scorer | None = None,
    data_folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
    device: str | None = None,
) -> dict[str, Any]:
    """Train a recipe; under torchrun, as one of its processes. Returns the content of ``run.json``, see `quiver.train`."""
    if resume and overwrite:
        raise InputError("--resume (resume=True) continues a run and --overwrite (overwrite=True) replaces it; use one of them")
    if (recipe.development is None) is not (scorer is None):
        raise ValueError("a scorer is given if and only if the recipe has a development collection")
    require_extra(recipe.kind)
    require_optimizer(recipe.training.optimizer)
    out, device = expand_home(out), check_device(device or default_device())
    with session_environment(out, device) as processes:
        resumed = out if resume else None
        recipe = run_folder.with_commit(with_training_dtype(recipe, device, resumed=resumed), resumed=resumed)
        run = Run(recipe, out, processes, device, scorer, progress, callbacks, command, data_folder)
        return _resume(run) if resume else _start(run, overwrite=overwrite)


def train_and_save(
    recipe: Recipe, rows: TrainingRows, model: Model, out: Path, *, progress: bool = False, command: str | None = None
) -> dict[str, Any]:
    """Train a recipe with rows and a model in memory."""
    device = str(model.encoder.device)
    with session_environment(out, model.encoder.device.type) as processes:
        recipe = with_training_dtype(recipe, device)
        return _start(Run(recipe, out, processes, device, progress=progress, command=command), given=(rows, model))


def check_rows(recipe: Recipe, rows: TrainingRows) -> None:
    """Check that rows fill at least one batch of one process."""
    batch_order(recipe, rows, Processes())


@dataclass(frozen=True)
class Run:
    """A run, as seen by one of its processes."""

    recipe: Recipe
    out: Path
    processes: Processes
    device: str
    scorer: Scorer | None = None
    progress: bool = False
    callbacks: Sequence[Callback] = ()
    command: str | None = None
    data_folder: Path | None = None

    @property
    def checkpoints(self) -> Checkpoints:
        """Checkpoints of the run."""
        return Checkpoints(self.out / CHECKPOINTS)

    def rows(self) -> TrainingRows:
        """Prepare the rows, or open them if another process or session has prepared them."""
        bar = self.progress and self.processes.is_main_process
        return prepare_rows(self.recipe.data, self.data_folder or self.out / DATA, seed=self.recipe.training.seed, progress=bar)

    def identity(self, rows: TrainingRows | None) -> RunIdentity:
        """What a session that resumes the run must equal; without rows, what is known before they are prepared."""
        fixed: dict[str, Any] = {"processes": self.processes.size}
        if rows is not None:
            fixed["data"] = rows.counts._asdict()
        about = run_folder.describe_session(self.command, self.device)
        # Without keep_best, which `_resume` compares, scores do not affect the weights.
        without_weight = WITHOUT_WEIGHT | {"development", "development.every"}
        return RunIdentity(self.recipe.model_dump(), fixed, about, schema=Recipe, without_weight=without_weight)


def _start(run: Run, *, overwrite: bool = False, given: tuple[TrainingRows, Model] | None = None) -> dict[str, Any]:
    """Train from the first step."""
    replaced: AbstractContextManager[None] = nullcontext()
    if run.processes.is_main_process:
        run_folder.refuse_existing(run.out, overwrite=overwrite)
        replaced = run_folder.new_run(run.out)
    with replaced:
        if run.processes.is_main_process:
            run.identity(None).write(run.out)
        run.processes.barrier()
        rows, model = given if given is not None else (run.rows(), None)
        if run.processes.is_main_process:
            run.identity(rows).write(run.out)
        return _train(run, rows, model, step=None)


def _resume(run: Run) -> dict[str, Any]:
    """Train from the last undamaged checkpoint, or from the first step if there is none."""
    processes = run.processes
    if processes.is_main_process and run_folder.is_run(run.out) and (run.out / RECORD).exists():  # killed after it was complete
        run_folder.remove_leftovers(run.out)
    run_folder.refuse_nothing_to_resume(run.out)
    # A resumed session chooses the model of the run as the interrupted one: by score, or not.
    sections = ((recipe or {}).get("development") or {} for recipe in (run_folder.recipe_of(run.out), run.recipe.model_dump()))
    was, now = (bool(section.get("keep_best")) for section in sections)
    if was is not now:
        raise InputError(
            f"{run.out}: development.keep_best was {str(was).lower()}, and the best score decides which checkpoint becomes the model; "
            "resume with the development section of the interrupted run"
        )
    run_folder.refuse_other_run(run.out, run.identity(None))
    rows = run.rows()
    return _train(run, rows, None, step=run_folder.resume_run(run.out, run.identity(rows), processes))


def _train(run: Run, rows: TrainingRows, model: Model | None, *, step: int | None) -> dict[str, Any]:
    """Train until the end, then write the model and the record; ``step`` as in `_fit`."""

    def first_model() -> Model:
        return build_model(run.recipe, rows.texts(), device=run.device) if model is None else model

    progress, schedule = _fit(run, rows, first_model, step=step)
    if run.processes.is_main_process:
        recipe, checkpoints, training = run.recipe, run.checkpoints, run.recipe.training
        if recipe.development is not None and recipe.development.keep_best and progress.best_step is not None:
            kept = [progress.best_step]
        else:
            kept = schedule.planned(checkpoints.steps(), training.save_every, progress.epoch_ends)[-training.average_checkpoints :]
            if len(kept) < training.average_checkpoints:
                text = "training.average_checkpoints: the run has %d checkpoints, not %d; lower training.save_every"
                logger.warning(text, len(kept), training.average_checkpoints)
        kept = checkpoints.sound(kept) or [progress.step]
        average = average_models([checkpoints.path(step) for step in kept])
        final = type(average).from_parts(average.encoder, average.tokenizer, average.settings, source=recipe.model.init)
        epochs = schedule.epochs(progress.epoch, progress.epoch_batches)
        weights = final.encoder.num_parameters + sum(weight.numel() for weight in final.projections.parameters())
        parts = {
            "data": {**rows.counts._asdict(), "revision": recipe.data.revision, "licence": recipe.data.licence},
            "batch": describe_batch(recipe, rows, run.processes.size),
            "model": {"parameters": weights, "base_model": base_model(recipe), **asdict(final.card)},
            "result": describe_result(read_log(run.out / LOG), progress, epochs=epochs, kept_steps=kept),
        }
        run_folder.finish_run(run.out, final.save_pretrained, run.identity(rows).record(SCHEMA, parts))
    run.processes.barrier()
    return read_json(run.out / RECORD)


def _fit(run: Run, rows: TrainingRows, first_model: Callable[[], Model], *, step: int | None) -> tuple[Progress, Schedule]:
    """Train until the end; ``step`` is that of the checkpoint to resume, 0 for a resumed run without one, None for a new run."""
    recipe, processes = run.recipe, run.processes
    training = recipe.training
    order = batch_order(recipe, rows, processes)
    schedule = Schedule.of(recipe, order.per_epoch)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_requests())  # a signal while the model is loaded stops the run after its first step
        model = first_or_saved_model(run, first_model, step=step or 0)
        if processes.is_main_process and not any(learning_rate_share(training, number, schedule.steps) for number in range(schedule.steps)):
            logger.warning(
                "nothing is trained: the run has one step, and its learning rate is 0, the start of the warm-up; set training.warmup_ratio "
                "to 0, or raise training.max_steps"
            )
        collator, loss, state = training_parts(run, model, schedule)
        progress, random_states = read_checkpoint(run.checkpoints.path(step), state) if step else (Progress(), None)
        if step is not None:
            progress.resumed_at.append(step)
        start, count = (progress.epoch, progress.epoch_batches), (schedule.steps - progress.step) * training.accumulation
        loader = DataLoader(order, rows, collator, processes, start=start, count=count)
        bar = training_bar(
            progress.step, schedule.steps, enabled=run.progress and processes.is_main_process, forms={**FORMS, SCORE: "nDCG@10 {:.2%}"}
        )
        board = tensorboard(
            run.out / TENSORBOARD, step=progress.step + 1, enabled=processes.is_main_process, names={SCORE: "development/ndcg_at_10"}
        )
        callbacks = [stack.enter_context(bar), stack.enter_context(board), *run.callbacks]
        settings = TrainerSettings(training.seed, training.max_grad_norm, COUNTS, callbacks=callbacks)
        Trainer(RetrievalTask(run, schedule, loss, state, loader), settings, run.out, processes, stop, progress, random_states).train()
    return progress, schedule


def training_parts(run: Run, model: Model, schedule: Schedule) -> tuple[Collator, RetrievalLoss, TrainState]:
    """What turns rows into batches, the loss around the model, and the weights with their new optimizer."""
    from quiver.retrieval.training.losses import RetrievalLoss  # imports the libraries of the extra

    recipe, processes, training = run.recipe, run.processes, run.recipe.training
    merged, minmax = recipe.loss.name == "distillation", recipe.loss.teacher_scores == "minmax"
    collator = Collator(model, max_length=training.max_length, merge_documents=merged, minmax=minmax)
    loss = RetrievalLoss(recipe, model, processes=processes.size)
    shards = shard(model, loss.model, processes) if training.sharding == "full" and processes.size > 1 else None
    optimizer, rates = make_optimizer(training, loss.model.named_parameters(), schedule.steps)
    return collator, loss, TrainState(model, loss.model, optimizer, rates, lora=training.lora is not None, shards=shards)


def batch_order(recipe: Recipe, rows: TrainingRows, processes: Processes) -> BatchOrder:
    """The batches of a run over all its processes."""
    training = recipe.training
    size = training.batch_size * processes.size
    return BatchOrder(rows, size=size, seed=training.seed, no_duplicates=training.no_duplicates, warn=processes.is_main_process)


def first_or_saved_model(run: Run, first_model: Callable[[], Model], *, step: int) -> Model:
    """The model at a step, with weights that can be trained; in a LoRA run the frozen weights with new low-rank matrices."""
    lora, start = run.recipe.training.lora, run.out / START
    if lora is None:
        return load_trainable(run.checkpoints.path(step), device=run.device) if step else first_model()
    model = load_trainable(start, device=run.device) if step else first_model()
    if not step and run.processes.is_main_process:
        # The frozen weights must stay the same even if the starting model changes or is deleted before the run is resumed.
        shutil.rmtree(start, ignore_errors=True)
        model.save_pretrained(start)
    add_lora(model.encoder, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, seed=run.recipe.training.seed)
    return model


@dataclass(frozen=True)
class RetrievalTask:
    """A dense or ColBERT recipe as the task of the trainer."""

    run: Run
    schedule: Schedule
    loss_function: RetrievalLoss
    state: TrainState
    loader: Iterable[TrainingBatch]
    learning_rate_setting: str = "training.learning_rate"

    @property
    def module(self) -> nn.Module:
        """Module that the loss calls."""
        return self.loss_function.model

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of all trained weights."""
        return self.state.optimizer

    @property
    def device(self) -> torch.device:
        """Device of the encoder."""
        return self.state.model.encoder.device

    @property
    def keep_best(self) -> int:
        """1 if the recipe keeps the checkpoint with the best score, else 0."""
        section = self.run.recipe.development
        return int(section is not None and section.keep_best)

    def steps(self) -> Iterator[list[TrainingBatch]]:
        """Yield the batches of each remaining step."""
        batches = iter(self.loader)
        while step := list(islice(batches, self.run.recipe.training.accumulation)):
            yield step

    def next_phase(self) -> bool:
        """Return False: the run has one phase."""
        return False

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self.loss_function(inputs)
        return loss

    def backward_passes(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of mini-batches of a cached loss, otherwise 1."""
        return self.loss_function.backward_passes(inputs)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        training = self.run.recipe.training
        return training.learning_rate * learning_rate_share(training, step - 1, self.schedule.steps)

    def after_step(self, step: int) -> None:
        """Advance the schedule."""
        del step  # the schedule counts steps itself; its state is part of the checkpoint
        self.state.schedule.step()

    def finished(self, progress: Progress) -> bool:
        """Whether this was the last step."""
        return progress.step == self.schedule.steps

    def log_due(self, progress: Progress) -> bool:
        """Whether a log line is written after this step."""
        return self.finished(progress) or progress.step % self.run.recipe.training.log_every == 0

    def position(self, progress: Progress) -> Mapping[str, float]:
        """Return the epoch, as a fraction."""
        return {"epoch": self.schedule.epochs(progress.epoch, progress.epoch_batches)}

    def log_values(self, progress: Progress) -> Mapping[str, float]:
        """Return no further values."""
        del progress
        return {}

    def evaluation_due(self, progress: Progress) -> bool:
        """Whether the model is scored on the development collection after this step."""
        section = self.run.recipe.development
        return section is not None and self._due(section.every, progress)

    def evaluate(self) -> Mapping[str, float]:
        """Return nDCG@10 on the development collection, computed by the main process; of several the mean, then that of each."""
        processes, scores, stopped = self.run.processes, dict[str, float](), False
        with self.state.model_for_use() as model, autocast(self.run.recipe.training.dtype, self.device):
            self.module.eval()
            if processes.is_main_process and model is not None and self.run.scorer is not None:
                try:
                    scored = self.run.scorer(model)
                    parts = scored if isinstance(scored, Mapping) else {"": scored}
                    scores[SCORE] = math.fsum(parts.values()) / len(parts)
                    scores |= {f"{PART_SCORE}{name}": score for name, score in parts.items() if len(parts) > 1}
                except WorkStoppedError:
                    stopped = True
        if processes.broadcast(float(stopped)):
            raise WorkStoppedError
        return processes.gather(scores)[0]

    def save_due(self, progress: Progress) -> bool:
        """Whether the recipe asks for a checkpoint after this step."""
        return self._due(self.run.recipe.training.save_every, progress)

    def save(self, folder: Path | None, progress: Progress, random_states: list[dict[str, Any]]) -> None:
        """Write a checkpoint, see `quiver.retrieval.training.state`."""
        write_checkpoint(folder, self.state, progress, random_states)

    def kept_steps(self, saved: list[int], progress: Progress) -> set[int]:
        """Return the steps of the newest checkpoints that the recipe asks for, of the best one, and of the current one.

        A checkpoint saved for a signal does not count, so that a run that was stopped ends with the checkpoints of one that was not.
        """
        training, best = self.run.recipe.training, progress.best_step
        planned = self.schedule.planned(saved, training.save_every, progress.epoch_ends)
        kept = {progress.step, *planned[-training.keep_checkpoints :]}
        return kept | {best} if self.keep_best and best is not None else kept

    def _due(self, every: int | None, progress: Progress) -> bool:
        return self.schedule.due(every, progress.step, progress.epoch_ends)


def base_model(recipe: Recipe) -> str | None:
    """Return the Hub id of the checkpoint that a recipe starts from; None for a local folder or random weights."""
    init = recipe.model.init
    return None if init == "random" or expand_home(init).is_dir() else init.partition("@")[0]


def describe_batch(recipe: Recipe, rows: TrainingRows, processes: int) -> dict[str, int]:
    """Return the number of rows per step, and of negatives per query, which is lower for rows with fewer documents."""
    training = recipe.training
    # With in-batch negatives, all documents of the other rows are negatives too.
    together = training.batch_size * (processes if recipe.loss.gather_across_devices else 1) if recipe.loss.name in IN_BATCH else 1
    return {
        "rows": training.batch_size,
        "accumulation": training.accumulation,
        "processes": processes,
        "effective": training.batch_size * training.accumulation * processes,
        "negatives_per_query": together * rows.documents_per_row - 1,
    }


def describe_result(log: Sequence[Line], progress: Progress, *, epochs: float, kept_steps: Sequence[int]) -> dict[str, Any]:
    """Return the result of a run, from its log and its last progress."""
    return {
        **progress.totals(),
        **training_curves(log),
        "epochs": epochs,
        "development": [
            {key: value for key, value in line.items() if key in ("step", SCORE, "seconds") or key.startswith(PART_SCORE)}
            for line in log
            if SCORE in line
        ],
        "kept_steps": list(kept_steps),
        "texts": progress.counts["texts"],
        "texts_truncated": progress.counts["truncated"],
    }
