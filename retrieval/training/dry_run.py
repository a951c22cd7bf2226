"""A dry run: read the data and the model of a recipe, train a few batches, and predict the whole run. Nothing is written.

Rows and updates are exact, and in a run that reads up to `COUNTED` rows the tokens too: rows are prepared and tokenized as in training.
Of each source of a pretraining corpus at most `READ` characters are read, and its updates follow from how full the measured rows are. The
first batch shows whether one fits into memory; the time is measured on those that follow.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from quiver.encoder.errors import InputError
from quiver.encoder.pretraining.corpus import Documents, first_documents
from quiver.encoder.pretraining.packing import SPECIAL
from quiver.encoder.pretraining.phases import BatchWarmup
from quiver.encoder.pretraining.recipe import PhaseSection, PretrainingRecipe
from quiver.encoder.pretraining.run import open_session, prepare
from quiver.encoder.pretraining.stream import read_shares
from quiver.encoder.pretraining.task import COUNTS as ROW_COUNTS
from quiver.encoder.pretraining.task import OPTIMIZER, PretrainingTask
from quiver.encoder.progress import progress_bar
from quiver.encoder.training.optimization import require_optimizer, with_training_dtype
from quiver.encoder.training.processes import StopRequest, peak_memory
from quiver.encoder.training.run_folder import DATA, session_environment
from quiver.encoder.training.trainer import Callback, Progress, Trainer, TrainerSettings, TrainingBatch
from quiver.retrieval.models.pretrained import check_device, default_device
from quiver.retrieval.training.data import prepare_rows
from quiver.retrieval.training.dataloader import DataLoader
from quiver.retrieval.training.model import build_model, require_extra
from quiver.retrieval.training.recipe import Recipe
from quiver.retrieval.training.run import COUNTS, RetrievalTask, Run, batch_order, describe_batch, first_or_saved_model, training_parts
from quiver.retrieval.training.state import Schedule

BATCHES = 5  # most batches that are timed
COUNTED = 20_000  # most rows whose tokens are counted; those of a run that reads more follow from the first, which are in random order
READ = 32 << 20  # most characters of each source of a pretraining corpus that are read


@dataclass(frozen=True)
class DryRun:
    """What a recipe would do on this machine, in one process."""

    rows: int
    skipped: int
    not_relevant: int
    rows_short: int
    rows_cut: int
    documents_per_row: int
    batch: dict[str, int]
    updates: int
    texts: int
    truncated: float
    tokens: int
    exact: bool  # counted, not estimated from a sample
    parameters: int
    device: str
    dtype: str
    peak_memory: int | None  # in bytes, on its GPU, otherwise in RAM; None where it cannot be read
    measured_batches: int
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """Estimated duration of the updates, evaluation and saving excluded."""
        return self.tokens / self.tokens_per_second


def dry_run(
    recipe: Recipe,
    *,
    device: str | None = None,
    seconds: float = 30.0,
    progress: bool = False,
    say: Callable[[str], None] | None = None,
    check: Callable[[], object] = lambda: None,
) -> DryRun:
    """Check the data, the model and the settings of a recipe, and measure a few batches; ``check`` runs after the rows have been read."""
    require_extra(recipe.kind)
    require_optimizer(recipe.training.optimizer)
    device = check_device(device or default_device())
    with TemporaryDirectory(prefix="quiver-dry-run-") as folder, session_environment(Path(folder), device) as processes:
        if processes.size > 1:
            raise InputError("a dry run is one process: start it without torchrun")
        recipe = with_training_dtype(recipe, device)
        rows = prepare_rows(recipe.data, Path(folder) / DATA, seed=recipe.training.seed, progress=progress)
        check()
        order = batch_order(recipe, rows, processes)
        schedule = Schedule.of(recipe, order.per_epoch)
        # An update of several batches is measured batch by batch.
        trial = recipe.replace(development=None, training=recipe.training.replace(accumulation=1, save_every=BATCHES + 2))
        run = Run(trial, Path(folder), processes, device)
        model = first_or_saved_model(run, lambda: build_model(recipe, rows.texts(), device=device), step=0)
        collator, loss, state = training_parts(run, model, schedule)
        batches = schedule.steps * schedule.accumulation
        read = min(batches, max(1, COUNTED // recipe.training.batch_size))
        with progress_bar("counting tokens", read, enabled=progress) as advance:
            for _ in DataLoader(order, rows, collator, processes, start=(0, 0), count=read):
                advance(1)
        texts, truncated, tokens = (round(collator.counts[name] * batches / read) for name in ("texts", "truncated", "tokens"))
        longer = Schedule(schedule.steps + BATCHES + 1, schedule.batches_per_epoch, 1)  # never finished, so nothing is saved

        def train_on(batches: Iterable[TrainingBatch], *callbacks: Callback) -> None:
            settings = TrainerSettings(trial.training.seed, trial.training.max_grad_norm, COUNTS, callbacks=callbacks)
            Trainer(RetrievalTask(run, longer, loss, state, batches), settings, run.out, processes, StopRequest(), Progress()).train()

        if say is not None:
            say("data, model and settings are valid; training a few batches to measure time and memory")
        first = list(DataLoader(order, rows, collator, processes, start=(0, 0), count=1))
        following = DataLoader(order, rows, collator, processes, start=(0, 1), count=BATCHES)
        timed = _Timed(([batch] for batch in following), seconds, progress=progress)
        try:
            # The first batch is slower: its time is taken only if there is none for more.
            begun = time.perf_counter()
            train_on(first)
            measured, rate = 1, first[0].tokens / (time.perf_counter() - begun)
            if first[0].tokens / rate < seconds:
                train_on(chain.from_iterable(timed), timed)
                measured, rate = timed.steps, timed.tokens_per_second
        except torch.OutOfMemoryError as error:
            smaller = "lower training.batch_size, use a cached loss, or set training.gradient_checkpointing"
            raise InputError(f"out of memory on {device} in a batch of {recipe.training.batch_size} rows; {smaller}") from error
        return DryRun(
            **{name: count for name, count in rows.counts._asdict().items() if name not in ("copies", "sha256")},
            batch=describe_batch(recipe, rows, processes.size),
            updates=schedule.steps,
            texts=texts,
            truncated=truncated / texts,
            tokens=tokens,
            exact=read == batches,
            parameters=sum(weight.numel() for weight in state.trained().values()),
            device=device,
            dtype=recipe.training.dtype,
            peak_memory=peak_memory(),
            measured_batches=measured,
            tokens_per_second=rate,
        )


class _Timed(Callback):
    """Batches of successive steps until the time is over, with the times at which the steps ended."""

    def __init__(self, batches: Iterable[list[TrainingBatch]], seconds: float, *, progress: bool) -> None:
        self._batches, self._seconds, self._progress = batches, seconds, progress
        self._times: list[float] = []
        self.tokens, self.counts = 0, Counter[str]()

    def __iter__(self) -> Iterator[list[TrainingBatch]]:
        with progress_bar("measuring batches", BATCHES, enabled=self._progress) as advance:
            self._times.append(time.perf_counter())
            for batches in self._batches:
                self.tokens += sum(batch.tokens for batch in batches)
                for batch in batches:
                    self.counts.update(batch.counts)
                yield batches
                advance(1)
                if self._times[-1] - self._times[0] > self._seconds:
                    return

    def on_step(self, step: int) -> None:
        del step
        if self._times:  # the first batch was taken
            self._times.append(time.perf_counter())

    @property
    def steps(self) -> int:
        return len(self._times) - 1

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self._times[-1] - self._times[0])


@dataclass(frozen=True)
class PhaseDryRun:
    """What a phase of a pretraining recipe would do."""

    name: str
    tokens: int
    passes: float
    split: float
    packing: float
    updates: int
    measured_updates: int
    tokens_per_second: float

    @property
    def seconds(self) -> float:
        """Estimated duration of the updates, evaluation and saving excluded."""
        return self.tokens / self.tokens_per_second


@dataclass(frozen=True)
class PretrainingDryRun:
    """What a pretraining recipe would do on this machine, in one process."""

    documents: int
    corpus_tokens: int
    held_out: int
    exact: bool  # counted, not estimated from a sample
    vocabulary: int
    phases: tuple[PhaseDryRun, ...]
    parameters: int
    device: str
    dtype: str
    peak_memory: int | None

    @property
    def updates(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.updates for phase in self.phases)

    @property
    def seconds(self) -> float:
        """Estimated duration of all updates, evaluation and saving excluded."""
        return sum(phase.seconds for phase in self.phases)


def dry_run_pretraining(
    recipe: PretrainingRecipe, *, device: str | None = None, seconds: float = 30.0, progress: bool = False
) -> PretrainingDryRun:
    """Check the corpus, the model and the settings of a pretraining recipe, and measure a few updates of each phase."""
    require_optimizer(OPTIMIZER)
    device = check_device(device or default_device())
    with TemporaryDirectory(prefix="quiver-dry-run-") as temporary, session_environment(Path(temporary), device) as processes:
        if processes.size > 1:
            raise InputError("a dry run is one process: start it without torchrun")
        recipe, out = with_training_dtype(recipe, device), Path(temporary) / "run"
        with progress_bar("reading the corpus", 1, enabled=progress):
            whole = all(sum(map(len, first_documents(source, READ))) < READ for source in recipe.data.sources)
            prepare(recipe, out, characters=None if whole else READ)
        # Few packed rows per update, and phases that do not end, so that nothing is evaluated or saved.
        sizes = [phase.micro_batch * max(1, _UPDATE_TOKENS // (phase.micro_batch * phase.context)) for phase in recipe.phases]
        sizes = [min(phase.batch_size, size) for phase, size in zip(recipe.phases, sizes, strict=True)]
        fewer = max(phase.batch_size / size for phase, size in zip(recipe.phases, sizes, strict=True))
        endless = {"batch_warmup_tokens": 0, "batch_warmup_from": None, "tokens": 1 << 60}
        phases = tuple(phase.replace(batch_size=size, **endless) for phase, size in zip(recipe.phases, sizes, strict=True))
        buffer = recipe.training.packing_buffer * fewer  # it is measured in updates
        training = recipe.training.replace(packing_buffer=buffer, evaluate_every=None, save_every=None)
        session = open_session(recipe.replace(probe=None, phases=phases, training=training), out, processes, device)
        timed, done = _Phases(seconds, progress=progress), Progress()
        task = PretrainingTask(replace(session, chosen=timed.chosen), done)
        settings = TrainerSettings(recipe.training.seed, counts=ROW_COUNTS, callbacks=[timed])
        try:
            Trainer(task, settings, out, processes, StopRequest(), done).train()
        except torch.OutOfMemoryError as error:
            smaller = "lower micro_batch of the phase with the longest context, or set training.gradient_checkpointing"
            raise InputError(f"out of memory on {device} in a packed row; {smaller}") from error
        corpus = session.corpus
        return PretrainingDryRun(
            documents=len(corpus.train),
            corpus_tokens=len(corpus.train.ids),
            held_out=len(corpus.held_out),
            exact=whole,
            vocabulary=len(session.tokenizer),
            phases=tuple(_phase(phase, corpus.train, each) for phase, each in zip(recipe.phases, timed.phases, strict=True)),
            parameters=sum(weight.numel() for weight in task.module.parameters()),
            device=device,
            dtype=recipe.training.dtype,
            peak_memory=peak_memory(),
        )


_UPDATE_TOKENS = 8192  # of a measured update, if a row has fewer: the time of the optimizer's step then hardly counts


class _Phases(Callback):
    """A few updates of each phase: an untimed one, which is slower than others, and some that are timed."""

    def __init__(self, seconds: float, *, progress: bool) -> None:
        self._seconds, self._progress = seconds, progress
        self.phases: list[_Timed] = []

    def chosen(self, steps: Iterator[list[TrainingBatch]]) -> Iterator[list[TrainingBatch]]:
        self.phases.append(timed := _Timed(islice(steps, BATCHES), self._seconds, progress=self._progress))
        yield next(steps)
        yield from timed

    def on_step(self, step: int) -> None:
        self.phases[-1].on_step(step)


def _phase(phase: PhaseSection, documents: Documents, timed: _Timed) -> PhaseDryRun:
    shares = read_shares(documents, phase)
    lengths = np.diff(documents.ends, prepend=0)
    packing = timed.tokens / timed.counts["room"]
    warmup, read, updates = BatchWarmup(phase), 0.0, 0
    while read < phase.tokens:
        read += warmup.rows(int(read)) * phase.micro_batch * phase.context * packing
        updates += 1
    return PhaseDryRun(
        name=phase.name,
        tokens=phase.tokens,
        passes=phase.tokens / sum(share.times * int(lengths[share.first : share.last].sum()) for share in shares),
        split=float((lengths > phase.context - SPECIAL).mean()),
        packing=packing,
        updates=updates,
        measured_updates=timed.steps,
        tokens_per_second=timed.tokens_per_second,
    )
