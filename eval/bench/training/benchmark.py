"""Training steps of both sides in turns, their losses beside each other, and the record of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

from quiver.encoder import Tokenizer
from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.benchmark import free_memory, load_average, origin, processor
from quiver.eval.bench.encoder.children import ChildError, peak_memory
from quiver.eval.bench.encoder.libraries import PEERS
from quiver.eval.bench.encoder.results import OWN, NotRun, PeakMemory, Settings
from quiver.eval.bench.encoder.rounds import Pass, naming_who_ran_out, time_in_turns, torch_threads
from quiver.eval.bench.encoder.text_libraries import quiet_libraries
from quiver.eval.bench.training.child import MODULE, TrainingChild
from quiver.eval.bench.training.results import Steps, TrainingBenchmark, TrainingSettings, WorkloadTimes, side_times, with_memory
from quiver.eval.bench.training.sides import LIBRARIES, SCORED, Side, Start, make_recipe, make_side, open_start, write_start
from quiver.eval.bench.training.workloads import Row, Source, TrainingWorkload, batches, synthetic_source
from quiver.retrieval.models.loading import default_device
from quiver.retrieval.progress import Advance, progress_bar
from quiver.retrieval.training.rules import LOSSES
from quiver.retrieval.training.start import require_extra


@dataclass(frozen=True)
class _Case:
    """A kind of model on a workload."""

    kind: str
    workload: TrainingWorkload
    rows: list[list[Row]]
    names: list[str]


def bench_training(
    model: str,
    workloads: Sequence[TrainingWorkload],
    settings: TrainingSettings,
    *,
    source: Source = synthetic_source,
    command: str | None = None,
    progress: bool = False,
) -> TrainingBenchmark:
    """Time training steps of Quiver beside those of plain sentence-transformers and PyLate.

    Args:
        model: A preset's name, or a folder or hub id: the encoder that all sides start from.
        workloads: What batches are made of.
        settings: How to run.
        source: Where the texts come from.
        command: The command line to record.
        progress: Show bars on standard error.

    Raises:
        InputError: Training is not installed, a loss is not one of its kind, or no workload fits the model.
        ValueError: ``settings.rounds`` < 1.
    """
    require_extra()
    _check(settings)
    load = load_average()
    with torch_threads(settings.threads), TemporaryDirectory(prefix="quiver-bench-") as folder:
        encoder, tokenizer = open_start(model, seed=settings.seed)
        config, parameters = encoder.config, encoder.num_parameters
        fitting = [workload for workload in workloads if workload.max_length <= config.max_positions]
        not_run = [
            NotRun(workload.name, f"texts of {workload.max_length:,} tokens, the model has {config.max_positions:,} positions")
            for workload in workloads
            if workload not in fitting
        ]
        if not fitting:
            raise InputError(f"{model}: {not_run[0].what} has {not_run[0].reason}; give another --workload or --model")
        reason = PEERS["transformers-sdpa"].unsupported_reason(config, Settings()) if settings.peers else None
        if reason is not None:
            not_run += [NotRun(LIBRARIES[kind], reason) for kind in settings.losses]
        compared = settings.peers and reason is None
        with quiet_libraries():
            start = write_start(Path(folder), encoder, tokenizer, settings, compared=compared)
        del encoder
        cases = [_case(kind, workload, tokenizer, settings, source, compared=compared) for workload in fitting for kind in settings.losses]
        found = _measured(cases, start, settings, not_run, progress=progress)
        provenance = origin(command)
    return TrainingBenchmark(
        model=model,
        family=config.family,
        parameters=parameters,
        settings=settings,
        workloads=tuple(found),
        not_run=tuple(not_run),
        processor=processor(default_device()),
        load_average=load,
        provenance=provenance,
    )


def _check(settings: TrainingSettings) -> None:
    if settings.rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {settings.rounds}")
    for kind, loss in settings.losses.items():
        if kind not in LOSSES:
            raise InputError(f"kind must be one of {', '.join(LOSSES)}, got {kind!r}")
        if loss not in LOSSES[kind]:
            raise InputError(f"a {kind} model is trained by {', '.join(LOSSES[kind])}, not by {loss!r}")


def _case(
    kind: str, workload: TrainingWorkload, tokenizer: Tokenizer, settings: TrainingSettings, source: Source, *, compared: bool
) -> _Case:
    size = settings.batch_size or workload.rows
    scored = settings.losses[kind] in SCORED
    rows = batches(workload, source, tokenizer, count=settings.rounds + 1, size=size, scored=scored, seed=settings.seed)
    return _Case(kind, workload, rows, [OWN, *([LIBRARIES[kind]] if compared else [])])


def _measured(
    cases: Sequence[_Case], start: Start, settings: TrainingSettings, not_run: list[NotRun], *, progress: bool
) -> list[WorkloadTimes]:
    with progress_bar("timing", sum(len(case.names) for case in cases) * (settings.rounds + 1), enabled=progress) as advance:
        found = [_timed(case, start, settings, advance) for case in cases]
    if not settings.memory:
        return found
    free_memory()
    with progress_bar("memory", sum(len(case.names) for case in cases), enabled=progress) as advance:
        return [with_memory(times, _memory(case, start, settings, not_run, advance)) for case, times in zip(cases, found, strict=True)]


def _timed(case: _Case, start: Start, settings: TrainingSettings, advance: Advance) -> WorkloadTimes:
    recipe = make_recipe(case.kind, case.workload, settings, start)
    with quiet_libraries():
        sides = {name: make_side(name, recipe, start, steps=len(case.rows)) for name in case.names}
    taken = {name: Steps() for name in sides}
    passes = {name: _pass(name, side, case, taken[name]) for name, side in sides.items()}
    for first in passes.values():
        first()
        advance(1)
    for name, seconds in time_in_turns(passes, rounds=settings.rounds, advance=advance).items():
        taken[name].seconds = seconds
    timed = case.rows[1:]
    lengths = [_lengths(sides[OWN], rows) for rows in timed]
    others = [side for name, side in sides.items() if name != OWN]
    tokens = tuple(map(sum, lengths))
    return WorkloadTimes(
        workload=case.workload.name,
        kind=case.kind,
        loss=recipe.loss.name,
        rows=len(timed[0]),
        documents=case.workload.per_row,
        tokens=tokens,
        padded=tuple(others[0].places(rows) for rows in timed) if others else None,
        longest=max(map(max, lengths)),
        sides=side_times(taken, tokens, comparable=not settings.dropout),
    )


def _pass(name: str, side: Side, case: _Case, taken: Steps) -> Pass:
    """A pass that takes the next batch each time."""
    batches_left = iter(case.rows)

    def step() -> None:
        with naming_who_ran_out(name, f"{case.workload.name} in batches of {len(case.rows[0])}"):
            started = process_time()
            taken.losses.append(side.step(next(batches_left)))
            taken.processor_seconds.append(process_time() - started)

    return step


def _lengths(side: Side, rows: Sequence[Row]) -> list[int]:
    """Tokens of each text of a batch."""
    return [length for column in side.columns(rows) for length in column["attention_mask"].sum(dim=1).tolist()]


def _memory(case: _Case, start: Start, settings: TrainingSettings, not_run: list[NotRun], advance: Advance) -> dict[str, PeakMemory]:
    """Each side's peak memory over all steps, in a fresh process; what fails is noted, for the times are worth keeping all the same."""
    memory = {}
    colbert = None if start.colbert is None else str(start.colbert)
    for name in case.names:
        child = TrainingChild(name, str(start.encoder), colbert, case.kind, case.workload, settings)
        try:
            memory[name] = peak_memory(child, {"batches": case.rows}, module=MODULE)
        except ChildError as error:
            not_run.append(NotRun(f"memory of {name} on {case.workload.name}, {case.kind}", str(error)))
        advance(1)
    return memory
