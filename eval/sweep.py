"""Sweeps: train a recipe of any kind with several settings, each in its own folder, and rank the runs by their scores.

    OUT/sweep.json                        all runs and candidates, the best first; rewritten after each run
    OUT/runs/learning_rate=3e-5_seed=1/   a run, as the command of its recipe writes it
    OUT/runs/.data/                       prepared rows shared by the runs; deleted when all runs are finished

A sweep that is started again keeps finished runs, resumes unfinished ones and retries failed ones. A candidate is a combination of all
settings but the seed; its score is the mean over the seeds. A recipe with ``kind: sweep`` names the runs one by one.

Source of the protocol: ModernBERT, arXiv:2412.13663, Table 9, where every model has its best learning rate, and appendix D, where one
switch of the architecture is changed at a time.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import itertools
import json
import logging
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.encoder.pretraining.recipe import KINDS as PRETRAINING_KINDS
from quiver.encoder.pretraining.recipe import PretrainingRecipe, load_pretraining_recipe
from quiver.encoder.schema import NonBlank, SchemaError, TextSchema
from quiver.encoder.training.recipe_file import (
    WITHOUT_WEIGHT,
    Overrides,
    RecipeSchema,
    find_recipe,
    load_sections,
    naming_fetch_command,
    recipe_kind,
)
from quiver.encoder.training.run_folder import BEGUN, is_run, lock_run, recipe_changes, recipe_of, remove_leftovers, remove_run
from quiver.encoder.training.run_folder import RECORD as RUN_RECORD
from quiver.eval.nlu.recipes import GLUE_KINDS, QA_KINDS, GlueRecipe, QaRecipe, load_glue_recipe, load_qa_recipe
from quiver.retrieval.training.data import discard_rows, source_stamps
from quiver.retrieval.training.recipe import SCORE, DevelopmentSection, Recipe, load_recipe
from quiver.retrieval.training.run import Scorer

logger = logging.getLogger(__name__)


LEARNING_RATE, SEED = "training.learning_rate", "training.seed"
RUN = "run"  # name of the axis of the runs that a sweep recipe lists

PAPER_LEARNING_RATES = ("1e-5", "2e-5", "3e-5", "5e-5", "8e-5", "1e-4")
"""Learning rates swept for the retrievers of the ModernBERT paper (arXiv:2412.13663, appendix E.2; Table 9 lists the best)."""

Value: TypeAlias = bool | int | float | str | list[int] | list[float] | list[str] | None  # value of a setting, as in JSON

_LONGEST_NAME = 60


class ListedRunSection(TextSchema):
    """A run of a sweep."""

    name: NonBlank
    """Name of the run in the table, and of its folder."""
    settings: tuple[NonBlank, ...] = ()
    """Changes to the recipe that is swept, each ``section.setting=value``."""
    seeds: tuple[int, ...] = ()
    """Values of ``training.seed``, each a run; none for the recipe's own seed."""


class SweepRecipe(RecipeSchema):
    """A sweep with its settings, for ``quiver sweep``."""

    kind: Literal["sweep"]
    """Kind of recipe."""
    recipe: NonBlank
    """Recipe that is swept, of any other kind: a file, or the name of a shipped one."""
    settings: tuple[NonBlank, ...] = ()
    """Changes for all runs, as on the command line: ``section.setting=value``, or several values to sweep."""
    runs: tuple[ListedRunSection, ...] = ()
    """Runs that differ in more than the values of settings; each combination of values in ``settings`` is trained for each of them."""


SWEEP_KINDS = ("sweep",)  # values of ``kind`` of sweep recipes


def load_sweep_recipe(path: str | Path | Mapping[str, Any], overrides: Overrides = ()) -> SweepRecipe:
    """Read and check a recipe of a sweep; the recipes that it names are checked by `make_grid`."""
    recipe = load_sections(path, SweepRecipe, (), kinds=SWEEP_KINDS, overrides=overrides)
    names = [run.name for run in recipe.runs]
    problems = [f"runs: the name {name!r} stands twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    problems += [
        f"runs.{number}.name: must be usable as a folder, got {name!r}" for number, name in enumerate(names) if _file_name(name) != name
    ]
    if problems:
        raise SchemaError(str(path), problems)
    return recipe


class Measure(NamedTuple):
    """A score of a run."""

    key: str
    """Its key in ``scores`` of sweep.json."""
    label: str
    """Its name in tables."""
    lower_is_better: bool = False
    """Whether a lower value is better."""
    in_points: bool = True
    """Whether it is a fraction, which is shown in points."""

    def show(self, value: float | None) -> str:
        """Format a value for a table; None is empty."""
        return "" if value is None else f"{100 * value:.2f}" if self.in_points else f"{value:.3f}"


@dataclass(frozen=True)
class RecipeKind:
    """What a sweep knows of recipes of one kind."""

    command: str
    """Command that runs such a recipe, after ``quiver``."""
    load: Callable[[str | Path, Overrides], RecipeSchema]
    """Reads and checks a recipe."""
    measures: tuple[Measure, ...] = ()
    """Scores of a run; the first one ranks."""
    scored_on: Callable[[Any], str | None] = lambda recipe: None
    """What a run is scored on, in words; None if the recipe leaves it out."""
    unscored: str = "it cannot be swept"
    """What to do about a recipe that leaves it out."""
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Settings that are swept where none is given."""


def _describe_development(recipe: Recipe) -> str | None:
    section = recipe.development
    return None if section is None else f"{', '.join(section.data)}, split {section.split}"


NDCG = Measure(SCORE, "nDCG@10")
RETRIEVER = RecipeKind(
    "train",
    load_recipe,
    (NDCG,),
    _describe_development,
    "a sweep needs a development collection to compare runs by nDCG@10; add a development section to the recipe, or "
    "development.data=FOLDER_OR_NAME to the command",
    {LEARNING_RATE: PAPER_LEARNING_RATES},
)
PRETRAINING = RecipeKind(
    "pretrain",
    load_pretraining_recipe,
    (
        Measure("held_out_loss", "held-out loss", lower_is_better=True, in_points=False),
        Measure("held_out_accuracy", "masked-token accuracy"),
        Measure("probe_score", "probe"),
    ),
    lambda recipe: "the documents that it holds out" if recipe.data.held_out else None,
    "a sweep compares runs by their held-out loss; set data.held_out=0.01",
)
GLUE = RecipeKind("glue", load_glue_recipe, (Measure("glue", "mean of the tasks"),), lambda recipe: ", ".join(recipe.trained))
QUESTIONS = RecipeKind(
    "qa train", load_qa_recipe, (Measure("f1", "F1"), Measure("exact", "EM")), lambda recipe: recipe.data.test or recipe.data.train
)
SWEEP = RecipeKind("sweep", load_sweep_recipe)
TRAINED_BY: Mapping[type[RecipeSchema], str] = {
    PretrainingRecipe: "quiver.eval.probe:pretrain",
    GlueRecipe: "quiver.eval.nlu.glue:train_glue",
    QaRecipe: "quiver.eval.nlu.qa_training:train_qa",
}
"""Recipes that are not of a retriever -> the function that trains them, imported when it is called."""


def kind_of(recipe: str | Path) -> RecipeKind:
    """The kind of a recipe, by path or name; one of an unknown kind as a retriever's, whose loader reports the kind."""
    name = recipe_kind(find_recipe(recipe))
    table = {PRETRAINING_KINDS: PRETRAINING, GLUE_KINDS: GLUE, QA_KINDS: QUESTIONS, SWEEP_KINDS: SWEEP}
    return next((kind for names, kind in table.items() if name in names), RETRIEVER)


@dataclass(frozen=True)
class GridRun:
    """One combination of values."""

    name: str
    settings: Mapping[str, Value]
    overrides: tuple[str, ...]
    recipe: RecipeSchema


@dataclass(frozen=True)
class Grid:
    """All runs of a sweep."""

    source: str
    """Recipe that is swept."""
    name: str
    fixed: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]
    runs: tuple[GridRun, ...]
    kind: RecipeKind

    @property
    def scored_on(self) -> str:
        """What the runs are scored on."""
        return str(self.kind.scored_on(self.runs[0].recipe))


def make_grid(source: str | Path, settings: Sequence[str] = ()) -> Grid:
    """Read a recipe for every combination of values; seeds vary fastest, so that one candidate is complete before the next begins.

    Args:
        source: A recipe of any kind, or a sweep recipe: a file, or the name of a shipped one.
        settings: ``section.setting=value``, or several values separated by commas; in front of the settings of a sweep recipe, whose own
            keys ``recipe`` and ``runs`` are set by them too.
    """
    plan = SweepRecipe(name=str(source), kind="sweep", recipe=str(source))
    if kind_of(source) is SWEEP:
        own = [setting for setting in settings if re.split("[.=]", setting)[0] in ("recipe", "runs")]
        settings = [setting for setting in settings if setting not in own]
        plan = load_sweep_recipe(source, own)
        named = {path_of(setting) for setting in settings}
        settings = [*(setting for setting in plan.settings if path_of(setting) not in named), *settings]
    kind = kind_of(plan.recipe)
    if kind is SWEEP:
        raise InputError(f"{source}: recipe {plan.recipe} is a sweep too; name the recipe that it sweeps")
    fixed, axes = _parse_settings(settings, {} if plan.runs else kind.axes)
    chosen = list(_combine_overrides(plan.runs, fixed, axes))
    if len(chosen) < 2:
        example = f"{path_of(fixed[-1])}=VALUE,VALUE" if fixed and not kind.axes else f"{LEARNING_RATE}=3e-5,8e-5"
        raise InputError(f"nothing to sweep: give at least one setting several values, such as {example}")
    recipes, problems = [], dict[str, None]()
    for _, overrides in chosen:
        try:
            recipes.append(kind.load(plan.recipe, overrides))
        except SchemaError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise SchemaError(plan.recipe, list(problems))
    _check_comparable(plan.recipe, kind, recipes)
    paths = [*axes, *([SEED] if SEED not in axes and any(run.seeds for run in plan.runs) else [])]
    labels, runs = short_names(paths), []
    for (listed, overrides), recipe in zip(chosen, recipes, strict=True):
        dumped = recipe.model_dump(mode="json")
        values: dict[str, Any] = {path: reduce(_get_setting, path.split("."), dumped) for path in paths}
        name = "_".join([*([listed] if listed else []), *(f"{labels[path]}={_file_name(value)}" for path, value in values.items())])
        runs.append(GridRun(name, ({RUN: listed} if listed else {}) | values, overrides, recipe))
    if repeated := [name for name, count in Counter(run.name for run in runs).items() if count > 1]:
        raise InputError(f"a value is repeated: {repeated[0]} occurs twice in the grid")
    paths = [*([RUN] if plan.runs else []), *paths]
    distinct = {path: {show_value(run.settings[path]): run.settings[path] for run in runs} for path in paths}  # lists cannot be keys
    found = {path: tuple(values.values()) for path, values in distinct.items()}
    return Grid(plan.recipe, _name_of(plan, recipes[0]), fixed, found, tuple(runs), kind)


def path_of(setting: str) -> str:
    """Dotted path of a setting, ``section.setting=value``."""
    return setting.partition("=")[0].strip()


def _get_setting(holder: Any, key: str) -> Any:
    return holder[int(key) if isinstance(holder, list) else key]


def _name_of(plan: SweepRecipe, recipe: RecipeSchema) -> str:
    return recipe.name if plan.name == plan.recipe else plan.name


def _combine_overrides(
    listed: Sequence[ListedRunSection], fixed: Sequence[str], axes: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name in the list, and overrides, of each run."""
    for run in listed or (None,):
        name, own, seeds = ("", (), ()) if run is None else (run.name, run.settings, run.seeds)
        for texts in itertools.product(*axes.values()):
            overrides = (*fixed, *own, *(f"{path}={text}" for path, text in zip(axes, texts, strict=True)))
            if SEED in axes or not seeds:
                yield name, overrides
            else:
                yield from ((name, (*overrides, f"{SEED}={seed}")) for seed in seeds)


def _check_comparable(source: str, kind: RecipeKind, recipes: Sequence[RecipeSchema]) -> None:
    scored = [kind.scored_on(recipe) for recipe in recipes]
    if None in scored:
        raise InputError(f"{source}: {kind.unscored}")
    if kind is RETRIEVER and len(set(scored)) > 1:
        raise InputError("development.data and development.split must be the same in all runs: scores on different data are not comparable")


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


def _parse_settings(settings: Sequence[str], default: Mapping[str, Sequence[str]]) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Overrides with one value, and axes in the order of the runs; ``default`` axes come first unless they are set."""
    fixed: list[str] = []
    axes: dict[str, list[str]] = {}
    named: set[str] = set()
    for setting in settings:
        path, text = path_of(setting), setting.partition("=")[2]
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
    axes = {path: list(values) for path, values in default.items() if path not in named} | axes
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

SCHEMA = "quiver-sweep/2"

State: TypeAlias = Literal["absent", "unfinished", "finished"]

# Errors that end one run but not the sweep: bad settings or data, a non-finite loss, lack of memory, a full disk.
FAILURES = (InputError, RuntimeError, MemoryError, OSError)


@dataclass(frozen=True)
class SweepRun:
    """State of one run."""

    folder: str
    settings: Mapping[str, Value]
    status: Literal["waiting", "finished", "failed"] = "waiting"
    scores: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Candidate:
    """Runs that differ only in the seed."""

    settings: Mapping[str, Value]
    overrides: tuple[str, ...]
    folders: tuple[str, ...]
    scores: Mapping[str, tuple[float, ...]]
    """Scores of the finished runs by measure, in the order of ``folders``."""
    missing: int

    def mean(self, measure: Measure) -> float | None:
        """Mean over the seeds; None if no run is finished."""
        return statistics.fmean(self.scores[measure.key]) if self.scores.get(measure.key) else None

    def deviation(self, measure: Measure) -> float | None:
        """Standard deviation over the seeds; None with fewer than two."""
        return statistics.stdev(self.scores[measure.key]) if len(self.scores.get(measure.key, ())) > 1 else None


@dataclass(frozen=True)
class Sweep:
    """State of a sweep."""

    recipe: str
    name: str
    trained_by: str
    """Command that trains the recipe, after ``quiver``."""
    command: str | None
    scored_on: str
    measures: tuple[Measure, ...]
    """Scores of a run; the first one ranks. Those that no run has are left out."""
    fixed: tuple[str, ...]
    axes: Mapping[str, tuple[Value, ...]]
    runs: tuple[SweepRun, ...]
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The complete candidate with the best mean score, the first of equals; None if no candidate is complete."""
        first = self.candidates[0]
        return None if first.missing else first


class Trainer:
    """Trains recipes of any kind as their commands do; development collections are read once."""

    def __init__(self, *, progress: bool = False, command: str | None = None, device: str | None = None) -> None:
        self._options: dict[str, Any] = {"progress": progress, "command": command, "device": device}
        self._scorers: dict[DevelopmentSection, Scorer] = {}

    def __call__(self, recipe: RecipeSchema, out: Path, *, resume: bool, data_folder: Path) -> None:
        """Train a new run, or resume the one in the folder; rows that runs share are prepared in ``data_folder``."""
        if isinstance(recipe, Recipe):
            from quiver.retrieval.training.run import train

            train(recipe, out, resume=resume, scorer=self.scorer(recipe), data_folder=data_folder, **self._options)
        else:
            module, _, name = TRAINED_BY[type(recipe)].partition(":")
            getattr(importlib.import_module(module), name)(recipe, out, resume=resume, **self._options)

    def check_data(self, grid: Grid) -> None:
        """Find the training data of retrievers and read their development collections, before the first run."""
        for recipe in (run.recipe for run in grid.runs):
            if isinstance(recipe, Recipe):
                with naming_fetch_command(grid.source, recipe.data):
                    source_stamps(recipe.data)
                self.scorer(recipe)

    def scorer(self, recipe: RecipeSchema) -> Scorer | None:
        """Read the development collection of a retriever's recipe, once."""
        section = recipe.development if isinstance(recipe, Recipe) else None
        if section is not None and section not in self._scorers:
            from quiver.eval.development import development_scorer

            self._scorers[section] = development_scorer(section, progress=self._options["progress"])
        return None if section is None else self._scorers[section]


def run_sweep(
    grid: Grid,
    out: Path,
    *,
    train: Callable[..., object],
    overwrite: bool = False,
    command: str | None = None,
    report: Callable[[str], None] = lambda line: None,
    changed: Callable[[Sweep], object] = lambda sweep: None,
) -> Sweep:
    """Train every run of a grid that is not trained yet; ``best`` of the result is None if no candidate is complete.

    ``train``, a `Trainer`, gets the recipe, the run folder, and the keywords ``resume`` and ``data_folder``.
    """
    with lock_run(out):
        (out / RUNS).mkdir(exist_ok=True)
        folders = [out / RUNS / run.name for run in grid.runs]
        if overwrite:
            parts = (part for run, folder in zip(grid.runs, folders, strict=True) for part, _ in _list_run_folders(run.recipe, folder))
            for part in filter(is_run, parts):
                remove_run(part)
        states = [_state_of_run(run.recipe, folder) for run, folder in zip(grid.runs, folders, strict=True)]
        results = [
            _read_result(run, folder) if state == "finished" else SweepRun(f"{RUNS}/{run.name}", run.settings)
            for run, folder, state in zip(grid.runs, folders, states, strict=True)
        ]
        if taken := states.count("finished"):
            report(f"{taken} of {len(results)} runs are already finished")
        sweep = _write_sweep(grid, results, out, command)
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
            train_run = partial(train, resume=state == "unfinished", data_folder=out / RUNS / DATA)
            results[position] = result = _train_run(run, folder, train_run)
            spent.append(time.perf_counter() - started)
            found = ", ".join(
                f"{each.label} {each.show(result.scores[each.key])}" for each in grid.kind.measures if each.key in result.scores
            )
            report(found if result.error is None else f"failed: {result.error}")
            sweep = _write_sweep(grid, results, out, command)
            changed(sweep)
        if all(result.status == "finished" for result in results):
            discard_rows(out / RUNS / DATA)
    if all(result.status == "failed" for result in results):
        raise InputError(f"{out}: every run failed, {out / results[0].folder} with: {results[0].error}")
    return sweep


def _list_run_folders(recipe: RecipeSchema, folder: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Folders that a run consists of, each with its recipe; GLUE has one per task."""
    if isinstance(recipe, GlueRecipe):
        from quiver.eval.nlu.glue_training import run_recipe

        return [(folder / task, run_recipe(recipe, task)) for task in recipe.trained]
    return [(folder, recipe.model_dump())]


def _state_of_run(recipe: RecipeSchema, folder: Path) -> State:
    states = [_state_of_folder(part, expected, type(recipe)) for part, expected in _list_run_folders(recipe, folder)]
    return states[0] if len(set(states)) == 1 else "unfinished"


def _state_of_folder(folder: Path, recipe: Mapping[str, Any], schema: type[RecipeSchema]) -> State:
    """State of a folder; leftovers of a finished run are deleted."""
    found, finished = recipe_of(folder), (folder / RUN_RECORD).is_file()
    if found is None:  # a run that was killed before it wrote its recipe starts over
        return "unfinished" if (folder / BEGUN).is_file() else "absent"
    for path, was, now in recipe_changes(found, recipe, schema):
        if path not in WITHOUT_WEIGHT:
            raise InputError(
                f"{folder}: a run with another {path} ({was!r} there, {now!r} now); choose another --out, or --overwrite all runs"
            )
    if finished:
        remove_leftovers(folder)
    return "finished" if finished else "unfinished"


def _train_run(run: GridRun, folder: Path, train: Callable[[RecipeSchema, Path], object]) -> SweepRun:
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
    """Result of a finished run."""
    records = [read_json(part / RUN_RECORD) for part, _ in _list_run_folders(run.recipe, folder)]
    seconds = math.fsum(record["result"]["seconds"] for record in records)
    return SweepRun(f"{RUNS}/{run.name}", run.settings, "finished", _collect_run_scores(run.recipe, records, folder), seconds)


def _collect_run_scores(recipe: RecipeSchema, records: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, float]:
    """Scores by measure, from the records of a finished run."""
    result = records[0]["result"]
    if isinstance(recipe, GlueRecipe):
        return {GLUE.measures[0].key: statistics.fmean(record["scores"]["score"] for record in records)}
    if isinstance(recipe, PretrainingRecipe):
        return {each.key: result["curves"][each.key][-1][1] for each in PRETRAINING.measures if result["curves"].get(each.key)}
    if isinstance(recipe, QaRecipe):
        return {each.key: records[0]["scores"]["scores"][each.key] for each in QUESTIONS.measures}
    scores = {scored["step"]: scored[SCORE] for scored in result["development"]}
    step = result["kept_steps"][-1]  # that of the weights, or the last of averaged checkpoints
    if step not in scores:
        raise InputError(f"{folder}: run.json has no nDCG@10 at step {step}; train the run again with --overwrite")
    return {SCORE: scores[step]}


def _write_sweep(grid: Grid, results: Sequence[SweepRun], out: Path, command: str | None) -> Sweep:
    first = grid.kind.measures[0]
    measures = tuple(each for each in grid.kind.measures if each is first or any(each.key in result.scores for result in results))
    candidates = _rank_candidates(grid, results)
    sweep = Sweep(
        grid.source, grid.name, grid.kind.command, command, grid.scored_on, measures, grid.fixed, grid.axes, tuple(results), candidates
    )
    described = asdict(sweep) | {"measures": [measure._asdict() for measure in measures]}
    for candidate, each in zip(described["candidates"], candidates, strict=True):
        candidate["mean"] = {measure.key: each.mean(measure) for measure in measures}
        candidate["deviation"] = {measure.key: each.deviation(measure) for measure in measures}
    best = None if sweep.best is None else described["candidates"][0]
    write_json(out / RECORD, {"schema": SCHEMA, "best": best, **described})
    return sweep


def _rank_candidates(grid: Grid, results: Sequence[SweepRun]) -> tuple[Candidate, ...]:
    """Candidates of the runs, best first."""
    together: dict[str, list[tuple[GridRun, SweepRun]]] = {}
    for run, result in zip(grid.runs, results, strict=True):
        key = json.dumps({path: value for path, value in run.settings.items() if path != SEED})
        together.setdefault(key, []).append((run, result))
    candidates = []
    for members in together.values():
        run, done = members[0][0], [result for _, result in members if result.status == "finished"]
        candidates.append(
            Candidate(
                {path: value for path, value in run.settings.items() if path != SEED},
                tuple(override for override in run.overrides if SEED not in run.settings or not override.startswith(f"{SEED}=")),
                tuple(result.folder for result in done),
                {key: tuple(result.scores[key] for result in done) for key in (done[0].scores if done else ())},
                len(members) - len(done),
            )
        )
    first = grid.kind.measures[0]
    sign = 1 if first.lower_is_better else -1
    return tuple(sorted(candidates, key=lambda each: (each.missing > 0, each.mean(first) is None, sign * (each.mean(first) or 0.0))))
