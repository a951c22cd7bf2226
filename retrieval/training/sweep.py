"""Sweeps: train a grid of settings, each run in its own folder, and rank them by their development score.

    OUT/sweep.json                        all runs and candidates, the best first; rewritten after each run
    OUT/runs/learning_rate=3e-5_seed=1/   a run, as ``quiver train`` writes it
    OUT/runs/.data/                       prepared rows shared by the runs; deleted when all runs are finished

A sweep that is started again keeps finished runs, resumes unfinished ones and retries failed ones. A candidate is a combination of all
settings but the seed; its score is the mean over the seeds.

Source of the protocol: ModernBERT, arXiv:2412.13663, Table 9, where every model has its best learning rate.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import logging
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.encoder.schema import SchemaError
from quiver.encoder.training.recipe_file import WITHOUT_WEIGHT
from quiver.encoder.training.run_folder import BEGUN, is_run, lock_run, recipe_changes, recipe_of, remove_leftovers, remove_run
from quiver.encoder.training.run_folder import RECORD as RUN_RECORD
from quiver.retrieval.training.data import discard_rows
from quiver.retrieval.training.recipe import SCORE, Recipe, load_recipe

logger = logging.getLogger(__name__)


LEARNING_RATE, SEED = "training.learning_rate", "training.seed"

PAPER_LEARNING_RATES = ("1e-5", "2e-5", "3e-5", "5e-5", "8e-5", "1e-4")
"""Learning rates swept for the retrievers of the ModernBERT paper (arXiv:2412.13663, appendix E.2; Table 9 lists the best)."""

Value: TypeAlias = bool | int | float | str | list[int] | list[float] | list[str] | None  # value of a setting, as in JSON

_LONGEST_NAME = 60


@dataclass(frozen=True)
class GridRun:
    """One combination of values."""

    name: str
    settings: Mapping[str, Value]
    overrides: tuple[str, ...]
    recipe: Recipe


@dataclass(frozen=True)
class Grid:
    """All combinations of values."""

    source: str
    fixed: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]
    runs: tuple[GridRun, ...]


def make_grid(source: str | Path, settings: Sequence[str] = ()) -> Grid:
    """Read a recipe for every combination of values; seeds vary fastest, so that one candidate is complete before the next begins."""
    fixed, axes = _parse(settings)
    combinations = list(itertools.product(*axes.values()))
    if len(combinations) < 2:
        raise InputError(f"nothing to sweep: give at least one setting several values, such as {LEARNING_RATE}=3e-5,8e-5")
    recipes, problems = [], dict[str, None]()
    for texts in combinations:
        overrides = (*fixed, *(f"{path}={text}" for path, text in zip(axes, texts, strict=True)))
        try:
            recipes.append((overrides, load_recipe(source, overrides)))
        except SchemaError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise SchemaError(str(source), list(problems))
    sections = [recipe.development for _, recipe in recipes]
    if any(section is None for section in sections):
        raise InputError(
            f"{source}: a sweep needs a development collection to compare runs by nDCG@10; add a development section to the recipe, "
            "or development.data=FOLDER_OR_NAME to the command"
        )
    if len({(section.data, section.split) for section in sections if section is not None}) > 1:
        raise InputError("development.data and development.split must be the same in all runs: scores on different data are not comparable")
    labels = short_names(axes)
    runs = []
    for overrides, recipe in recipes:
        dumped = recipe.model_dump(mode="json")
        values: dict[str, Any] = {path: reduce(getitem, path.split("."), dumped) for path in axes}
        name = "_".join(f"{labels[path]}={_file_name(value)}" for path, value in values.items())
        runs.append(GridRun(name, values, overrides, recipe))
    if repeated := [name for name, count in Counter(run.name for run in runs).items() if count > 1]:
        raise InputError(f"a value is repeated: {repeated[0]} occurs twice in the grid")
    distinct = {path: {show_value(run.settings[path]): run.settings[path] for run in runs} for path in axes}  # lists cannot be keys
    return Grid(str(source), fixed, {path: tuple(values.values()) for path, values in distinct.items()}, tuple(runs))


def show_value(value: Value) -> str:
    """Format a value as in a recipe; a list of one value is shown as the value.

    Example:
        >>> [show_value(value) for value in (3e-05, 0.0001, 0.05, 20.0, 64, True, None, [384, 128], ["a.jsonl"], "cls")]
        ['3e-5', '1e-4', '0.05', '20', '64', 'true', 'null', '[384, 128]', 'a.jsonl', 'cls']
    """
    if isinstance(value, list):
        return show_value(value[0]) if len(value) == 1 else f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        small = 0 < abs(value) < 0.01
        return np.format_float_scientific(value, trim="-", exp_digits=1) if small else np.format_float_positional(value, trim="-")
    return str(value)


def show_settings(settings: Mapping[str, Value]) -> str:
    """Format settings in one line, without their sections."""
    labels = short_names(settings)
    return " ".join(f"{labels[path]}={show_value(value)}" for path, value in settings.items())


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Return the last part of each dotted path, or the whole path if two last parts are equal."""
    last = {path: path.rpartition(".")[2] for path in paths}
    return {path: label if list(last.values()).count(label) == 1 else path for path, label in last.items()}


def split_values(text: str) -> list[str]:
    """Split values at commas outside of quotes and brackets.

    Example:
        >>> split_values('[2, 1],[2],"a, b",c')
        ['[2, 1]', '[2]', '"a, b"', 'c']
    """
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not parts[-1].strip():
            quote = character  # only at the start of a value, since an apostrophe may occur in a word
        elif character in "[]":
            depth += 1 if character == "[" else -1
        elif character == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += character
    return parts


def _parse(settings: Sequence[str]) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Overrides with one value, and axes in the order of the runs."""
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    named: set[str] = set()
    for setting in settings:
        path, _, text = setting.partition("=")
        path = path.strip()
        if path in named:
            raise InputError(f"{path} is set twice; pass all its values at once: {path}=value,value")
        named.add(path)
        values = split_values(text)
        if len(values) == 1:
            fixed.append(setting)
        elif not all(value.strip() for value in values):
            raise InputError(f"{setting}: a value between two commas is empty; put a text that contains a comma in quotes")
        else:
            axes[path] = values
    if LEARNING_RATE not in named:
        axes = {LEARNING_RATE: list(PAPER_LEARNING_RATES), **axes}
    if SEED in axes:
        axes[SEED] = axes.pop(SEED)
    return tuple(fixed), axes


def _file_name(value: Value) -> str:
    """A value as part of a folder name; a value that has to be changed for that gets a checksum."""
    shown = show_value(value)
    safe = re.sub(r"[^A-Za-z0-9.+-]+", "-", shown).strip("-.")
    if safe == shown and len(safe) <= _LONGEST_NAME:
        return safe
    return f"{safe[-_LONGEST_NAME:].lstrip('-.')}-{hashlib.sha256(shown.encode()).hexdigest()[:8]}"


RECORD, RUNS, DATA = "sweep.json", "runs", ".data"  # files and folders of a sweep

SCHEMA = "quiver-sweep/1"

# Errors that end one run but not the sweep: bad settings or data, a non-finite loss, lack of memory, a full disk.
FAILURES = (InputError, RuntimeError, MemoryError, OSError)


Train: TypeAlias = Callable[..., object]
"""`quiver.retrieval.training.run.train`: gets the recipe, the run folder, and the keywords ``resume`` and ``data_folder``."""


@dataclass(frozen=True)
class SweepRun:
    """State of one run."""

    folder: str
    settings: Mapping[str, Value]
    status: Literal["waiting", "finished", "failed"] = "waiting"
    score: float | None = None
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Candidate:
    """Runs that differ only in the seed."""

    settings: Mapping[str, Value]
    overrides: tuple[str, ...]
    folders: tuple[str, ...]
    scores: tuple[float, ...]
    missing: int
    mean: float | None
    deviation: float | None


@dataclass(frozen=True)
class Sweep:
    """State of a sweep."""

    recipe: str
    name: str
    command: str | None
    development: Mapping[str, str]
    fixed: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]
    runs: tuple[SweepRun, ...]
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The complete candidate with the highest mean score, the first of equals; None if no candidate is complete."""
        first = self.candidates[0]
        return None if first.missing else first


def run_sweep(
    grid: Grid,
    out: Path,
    *,
    train: Train,
    overwrite: bool = False,
    command: str | None = None,
    report: Callable[[str], None] = lambda line: None,
    changed: Callable[[Sweep], object] = lambda sweep: None,
) -> Sweep:
    """Train every run of a grid that is not trained yet; ``best`` of the result is None if no candidate is complete."""
    with lock_run(out):
        (out / RUNS).mkdir(exist_ok=True)
        folders = [out / RUNS / run.name for run in grid.runs]
        if overwrite:
            for folder in filter(is_run, folders):
                remove_run(folder)
        states = [_state_of_folder(run.recipe, folder) for run, folder in zip(grid.runs, folders, strict=True)]
        results = [
            _read_result(run, folder) if state == "finished" else SweepRun(f"{RUNS}/{run.name}", run.settings)
            for run, folder, state in zip(grid.runs, folders, states, strict=True)
        ]
        if taken := states.count("finished"):
            report(f"{taken} of {len(results)} runs are already finished")
        sweep = _write(grid, results, out, command)
        changed(sweep)
        spent: list[float] = []
        for position, (run, folder, state) in enumerate(zip(grid.runs, folders, states, strict=True)):
            if state == "finished":
                continue
            left = ""
            if spent:
                minutes = statistics.fmean(spent) * sum(result.status == "waiting" for result in results) / 60
                left = f" (about {minutes / 60:.1f} h left)" if minutes >= 90 else f" (about {max(1, round(minutes))} min left)"
            report(f"run {position + 1} of {len(results)}: {run.name}{left}")
            started = time.perf_counter()
            results[position] = _train_run(run, folder, partial(train, resume=state == "unfinished", data_folder=out / RUNS / DATA))
            spent.append(time.perf_counter() - started)
            score = results[position].score
            report(f"failed: {results[position].error}" if score is None else f"nDCG@10 {100 * score:.2f}")
            sweep = _write(grid, results, out, command)
            changed(sweep)
        if all(result.status == "finished" for result in results):
            discard_rows(out / RUNS / DATA)
    if all(result.status == "failed" for result in results):
        raise InputError(f"{out}: every run failed, {results[0].folder} with: {results[0].error}")
    return sweep


def _state_of_folder(recipe: Recipe, folder: Path) -> Literal["absent", "unfinished", "finished"]:
    """State of a run's folder; leftovers of a finished run are deleted."""
    found, finished = recipe_of(folder), (folder / RUN_RECORD).is_file()
    if found is None:  # a run that was killed before it wrote its recipe starts over
        return "unfinished" if (folder / BEGUN).is_file() else "absent"
    for path, was, now in recipe_changes(found, recipe.model_dump(), Recipe):
        if path not in WITHOUT_WEIGHT:
            raise InputError(
                f"{folder}: a run with another {path} ({was!r} there, {now!r} now); choose another --out, or --overwrite all runs"
            )
    if finished:
        remove_leftovers(folder)
    return "finished" if finished else "unfinished"


def _train_run(run: GridRun, folder: Path, train: Callable[[Recipe, Path], object]) -> SweepRun:
    try:
        train(run.recipe, folder)
        return _read_result(run, folder)
    except FAILURES as error:
        logger.info("%s failed", folder, exc_info=True)
        reason = str(error).strip().splitlines()
        return SweepRun(f"{RUNS}/{run.name}", run.settings, "failed", error=reason[0] if reason else type(error).__name__)
    finally:
        # torch's schedules and the cached losses form reference cycles: without a collection, two models are in memory during the next run.
        gc.collect()


def _read_result(run: GridRun, folder: Path) -> SweepRun:
    """Result of a finished run: the score at the step of its weights, or at the last of averaged checkpoints."""
    result = read_json(folder / RUN_RECORD)["result"]
    scores = {scored["step"]: scored[SCORE] for scored in result["development"]}
    step = result["kept_steps"][-1]
    if step not in scores:
        raise InputError(f"{folder}: run.json has no nDCG@10 at step {step}; train the run again with --overwrite")
    return SweepRun(f"{RUNS}/{run.name}", run.settings, "finished", scores[step], result["seconds"])


def _write(grid: Grid, results: Sequence[SweepRun], out: Path, command: str | None) -> Sweep:
    recipe = grid.runs[0].recipe
    development = {} if recipe.development is None else {"data": recipe.development.data, "split": recipe.development.split}
    candidates = _rank_candidates(grid, results)
    sweep = Sweep(grid.source, recipe.name, command, development, grid.fixed, grid.axes, tuple(results), candidates)
    best = None if sweep.best is None else asdict(sweep.best)
    write_json(out / RECORD, {"schema": SCHEMA, "measure": SCORE, "best": best, **asdict(sweep)})
    return sweep


def _rank_candidates(grid: Grid, results: Sequence[SweepRun]) -> tuple[Candidate, ...]:
    """Candidates of the runs, best first."""
    together: dict[str, list[tuple[GridRun, SweepRun]]] = {}
    for run, result in zip(grid.runs, results, strict=True):
        key = json.dumps({path: value for path, value in run.settings.items() if path != SEED})
        together.setdefault(key, []).append((run, result))
    candidates = []
    for members in together.values():
        run, done = members[0][0], [(result.folder, result.score) for _, result in members if result.score is not None]
        scores = [score for _, score in done]
        candidates.append(
            Candidate(
                {path: value for path, value in run.settings.items() if path != SEED},
                tuple(override for override in run.overrides if SEED not in run.settings or not override.startswith(f"{SEED}=")),
                tuple(folder for folder, _ in done),
                tuple(scores),
                len(members) - len(done),
                statistics.fmean(scores) if scores else None,
                statistics.stdev(scores) if len(scores) > 1 else None,
            )
        )
    return tuple(sorted(candidates, key=lambda each: (each.missing > 0, each.mean is None, -(each.mean or 0.0))))
