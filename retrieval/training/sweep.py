"""A sweep: one run after the other, each in its own folder, and the settings whose runs scored best on the development collection.

    OUT/sweep.json                        every run, every candidate, the best first; written anew after each run
    OUT/runs/learning_rate=3e-5_seed=1/   a run, as ``quiver train`` leaves it
    OUT/runs/.data/                       prepared rows, which runs on the same data share; removed when all runs are finished

Started again, a sweep takes over what is finished, goes on with what is not, and tries again what failed. A candidate is a
combination of all settings but the seed; its score is the mean over the seeds.
Source of the protocol: ModernBERT, arXiv:2412.13663, Table 9, where every model has the learning rate that was the best for it.
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from filelock import FileLock, Timeout

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.retrieval.training.data import discard_rows
from quiver.retrieval.training.grid import SEED, Grid, GridRun, Value
from quiver.retrieval.training.loop.task import SCORE
from quiver.retrieval.training.run_folder import BEGUN, WITHOUT_WEIGHT, is_run, recipe_changes, recipe_of, remove_leftovers, remove_run
from quiver.retrieval.training.run_folder import RECORD as RUN_RECORD
from quiver.retrieval.training.sections import Recipe

logger = logging.getLogger(__name__)

RECORD, RUNS, DATA, LOCK = "sweep.json", "runs", ".data", ".lock"
"""What a sweep leaves in its folder, and what keeps a second one out of it."""

SCHEMA = "quiver-sweep/1"

# What ends one run and not the sweep: bad settings or data, a loss that is not finite, memory, a full disk.
FAILURES = (InputError, RuntimeError, MemoryError, OSError)


class Train(Protocol):
    """`quiver.retrieval.training.run.train` with all that is the same for every run bound."""

    def __call__(self, recipe: Recipe, out: Path, *, resume: bool, data_folder: Path) -> object:
        """Train into a folder; go on there with ``resume``; prepared rows lie in ``data_folder``."""


@dataclass(frozen=True)
class RunResult:
    """What became of one run.

    Attributes:
        folder: Its folder, from the sweep's.
        settings: Dotted path of every axis -> its value.
        status: ``waiting`` until it is done.
        score: nDCG@10 of its model on the development collection, of an average of checkpoints that of the last; None unless finished.
        seconds: It trained, earlier sessions included; None unless finished.
        error: Why it failed; None otherwise.
    """

    folder: str
    settings: Mapping[str, Value]
    status: Literal["waiting", "finished", "failed"] = "waiting"
    score: float | None = None
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Candidate:
    """The runs that differ in nothing but the seed.

    Attributes:
        settings: Dotted path of every axis but the seed -> its value.
        overrides: What ``quiver train`` takes to train it.
        folders: Its runs that are finished.
        scores: Their nDCG@10.
        missing: Runs that failed or are not done.
        mean: Of the scores; None if there are none.
        deviation: Their standard deviation (n - 1); None below two.
    """

    settings: Mapping[str, Value]
    overrides: tuple[str, ...]
    folders: tuple[str, ...]
    scores: tuple[float, ...]
    missing: int
    mean: float | None
    deviation: float | None


@dataclass(frozen=True)
class Sweep:
    """What a sweep has found so far.

    Attributes:
        recipe: Where the recipe came from.
        name: The recipe's name.
        command: The command line; None from Python.
        development: Collection and split that the runs are scored on.
        fixed: Overrides that all runs share.
        axes: Dotted path -> values.
        runs: In the order of the grid.
        candidates: Best first; those with a run missing behind all that are whole.
    """

    recipe: str
    name: str
    command: str | None
    development: Mapping[str, str]
    fixed: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]
    runs: tuple[RunResult, ...]
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The candidate with the highest mean among those whose runs are all finished; the first in the grid of equals."""
        first = self.candidates[0]
        return None if first.missing else first


def run_sweep(
    grid: Grid,
    out: Path,
    *,
    train: Train,
    overwrite: bool = False,
    command: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
    changed: Callable[[Sweep], None] = lambda sweep: None,
) -> Sweep:
    """Train every run of a grid that is not trained yet.

    Args:
        grid: What `quiver.retrieval.training.grid.make_grid` made.
        out: Folder of the sweep; what it holds of the same grid, or of a smaller one, is taken over.
        train: Trains one run and scores it on its development collection.
        overwrite: Remove the grid's runs that are there, and nothing else in their folders, and train all of them; without it a sweep
            that was stopped then goes on.
        command: The command line to record.
        tell: Gets a line when a run begins and when it ends, for whoever is watching.
        changed: Gets the state of the sweep whenever ``sweep.json`` has been written.

    Returns:
        All runs and candidates; ``best`` is None if no candidate is whole.

    Raises:
        InputError: ``out`` holds runs of another recipe, is in use, or cannot be written; or every run failed.
    """
    with _alone(out):
        folders = [out / RUNS / run.name for run in grid.runs]
        if overwrite:
            for folder in filter(is_run, folders):
                remove_run(folder)
        states = [_state(run.recipe, folder) for run, folder in zip(grid.runs, folders, strict=True)]
        results = [
            _finished(run, folder) if state == "finished" else RunResult(_relative(run), run.settings)
            for run, folder, state in zip(grid.runs, folders, states, strict=True)
        ]
        if taken := states.count("finished"):
            tell(f"{taken} of {len(results)} runs are finished already")
        sweep = _write(grid, results, out, command)
        changed(sweep)
        spent: list[float] = []
        for place, (run, folder, state) in enumerate(zip(grid.runs, folders, states, strict=True)):
            if state == "finished":
                continue
            waiting = sum(result.status == "waiting" for result in results)
            tell(f"run {place + 1} of {len(results)}: {run.name}{_remaining(spent, waiting)}")
            started = time.perf_counter()
            results[place] = _trained(run, folder, partial(train, resume=state == "unfinished", data_folder=out / RUNS / DATA))
            spent.append(time.perf_counter() - started)
            tell(_outcome(results[place]))
            sweep = _write(grid, results, out, command)
            changed(sweep)
        if all(result.status == "finished" for result in results):
            discard_rows(out / RUNS / DATA)
    if all(result.status == "failed" for result in results):
        raise InputError(f"{out}: every run failed, {results[0].folder} with: {results[0].error}")
    return sweep


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """The folder, made and held until the block ends."""
    try:
        (out / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    lock = FileLock(out / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InputError(f"{out}: another sweep is running in this folder; wait for it, or choose another --out") from error
    try:
        yield
    finally:
        lock.release()


def _state(recipe: Recipe, folder: Path) -> Literal["absent", "unfinished", "finished"]:
    """How far a run is; what a complete one needs no more is removed.

    Raises:
        InputError: It is a run of another recipe; names the first setting that differs.
    """
    there, finished = recipe_of(folder), (folder / RUN_RECORD).is_file()
    if there is None:  # a run that was killed before it wrote its recipe begins again
        return "unfinished" if (folder / BEGUN).is_file() else "absent"
    for path, was, now in recipe_changes(there, recipe.model_dump()):
        if path not in WITHOUT_WEIGHT:
            raise InputError(
                f"{folder}: a run with another {path} ({was!r} there, {now!r} now); choose another --out, or --overwrite all runs"
            )
    if finished:
        remove_leftovers(folder)
    return "finished" if finished else "unfinished"


def _trained(run: GridRun, folder: Path, train: Callable[[Recipe, Path], object]) -> RunResult:
    try:
        train(run.recipe, folder)
        return _finished(run, folder)
    except FAILURES as error:
        logger.info("%s failed", folder, exc_info=True)
        reason = str(error).strip().splitlines()
        return RunResult(_relative(run), run.settings, "failed", error=reason[0] if reason else type(error).__name__)
    finally:
        gc.collect()  # trainers are full of cycles: without this two models are in memory while the next one starts


def _finished(run: GridRun, folder: Path) -> RunResult:
    """What the record of a run says of its model: the score at the step whose weights it has, or for an average at the last of them."""
    result = read_json(folder / RUN_RECORD)["result"]
    scores = {scored["step"]: scored[SCORE] for scored in result["development"]}
    step = result["kept_steps"][-1]
    if step not in scores:
        raise InputError(f"{folder}: its record has no nDCG@10 at step {step}; train it again with --overwrite")
    return RunResult(_relative(run), run.settings, "finished", scores[step], result["seconds"])


def _relative(run: GridRun) -> str:
    return f"{RUNS}/{run.name}"


def _write(grid: Grid, results: Sequence[RunResult], out: Path, command: str | None) -> Sweep:
    recipe = grid.runs[0].recipe
    data = recipe.development
    development = {} if data is None else {"data": data.data, "split": data.split}
    candidates = _candidates(grid, results)
    sweep = Sweep(grid.source, recipe.name, command, development, grid.fixed, grid.axes, tuple(results), candidates)
    best = None if sweep.best is None else asdict(sweep.best)
    write_json(out / RECORD, {"schema": SCHEMA, "measure": SCORE, "best": best, **asdict(sweep)})
    return sweep


def _candidates(grid: Grid, results: Sequence[RunResult]) -> tuple[Candidate, ...]:
    """Runs brought together over their seeds, best first."""
    together: dict[str, list[tuple[GridRun, RunResult]]] = {}
    for run, result in zip(grid.runs, results, strict=True):
        key = json.dumps({path: value for path, value in run.settings.items() if path != SEED})
        together.setdefault(key, []).append((run, result))
    candidates = [_candidate(members) for members in together.values()]
    return tuple(sorted(candidates, key=lambda each: (each.missing > 0, each.mean is None, -(each.mean or 0.0))))


def _candidate(members: Sequence[tuple[GridRun, RunResult]]) -> Candidate:
    run = members[0][0]
    done = [(result.folder, result.score) for _, result in members if result.score is not None]
    scores = [score for _, score in done]
    return Candidate(
        {path: value for path, value in run.settings.items() if path != SEED},
        tuple(override for override in run.overrides if SEED not in run.settings or not override.startswith(f"{SEED}=")),
        tuple(folder for folder, _ in done),
        tuple(scores),
        len(members) - len(done),
        statistics.fmean(scores) if scores else None,
        statistics.stdev(scores) if len(scores) > 1 else None,
    )


def _outcome(result: RunResult) -> str:
    return f"failed: {result.error}" if result.score is None else f"nDCG@10 {result.score:.4f}"


def _remaining(spent: Iterable[float], waiting: int) -> str:
    """How long the runs that wait will take, by those of this session."""
    times = list(spent)
    if not times:
        return ""
    minutes = statistics.fmean(times) * waiting / 60
    return f" (about {minutes / 60:.1f} h left)" if minutes >= 90 else f" (about {max(1, round(minutes))} min left)"
