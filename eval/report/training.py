"""Reports of training: one of a training or pretraining run, and one of a sweep over recipes.

The report of a run has curves, development scores, log, settings, data, versions and command. A finished run is read from ``run.json``; a
running or stopped one from its recipe and its log. The report adds no number that is not in these files, except running means and
medians, which are labelled so. The report of a sweep has the candidates, best first, the command that trains the best one, and a chart of
the scores.
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.training.run_folder import BEGUN, LOG, RECIPE, RECORD, curve, read_log
from quiver.eval.report.charts import (
    PALETTE,
    WIDTH,
    Bar,
    Curve,
    Key,
    Points,
    axis_top,
    bar_chart,
    curve_chart,
    curve_note,
    finite,
    fit,
    new_figure,
    style,
    visible,
)
from quiver.eval.report.compare import LABELS, points
from quiver.eval.report.formats import (
    Block,
    Code,
    Column,
    Figure,
    Gallery,
    Paragraph,
    Properties,
    Report,
    Section,
    Span,
    Table,
    table,
    write,
    write_folder,
)
from quiver.eval.results import HEADLINE
from quiver.eval.sweep import LEARNING_RATE, RUN, SEED, Candidate, Measure, Sweep, Value, short_names, show_settings, show_value
from quiver.retrieval.training.recipe import PART_SCORE

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


CURVES: Mapping[str, str] = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens/s",
}
"""Metric in the log of a training run -> title of its chart and column."""

PRETRAINING = "pretraining"
"""Value of ``kind`` in a pretraining recipe."""

PRETRAINING_CURVES: Mapping[str, str] = {
    "loss": "Loss",
    "z_loss": "z-loss",
    "held_out_loss": "Held-out loss",
    "held_out_accuracy": "Held-out accuracy",
    "probe_score": "Probe",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens/s",
    "flops_per_second": "Model FLOP/s",
    "packing": "Packing",
    "learning_rate": "Learning rate",
    "batch_size": "Batch, sequences of full context",
}
"""Metric in the log of a pretraining run -> title of its chart and column."""

RECORDED: Mapping[str, str] = {
    "loss": "losses",
    "learning_rate": "learning_rates",
    "grad_norm": "grad_norms",
    "tokens_per_second": "tokens_per_second",
}
"""Metric in the log -> key of ``result`` in ``run.json`` with the same values as [step, value] pairs."""

NOISY = ("loss", "grad_norm", "tokens_per_second")
"""Metrics that get a running mean."""

SHARES = ("packing", "held_out_accuracy", "probe_score")
"""Metrics that are fractions, shown in points (hundredths)."""

LINES = 20
"""Maximum number of log lines in the table, evenly spread."""

TOTALS = ("epochs", "kept_steps", "texts", "texts_truncated", "tokens", "seconds", "peak_memory_bytes")
"""Keys of ``result`` that are totals of the whole run."""

ON_GPU = ("activation_bytes",)
"""Those of a run on a GPU."""

_SHOWN_ELSEWHERE = ("recipe", "result", "command", "date", "schema")


@dataclass(frozen=True)
class TrainingRun:
    """Content of a run folder that a report shows."""

    title: str
    recipe: Mapping[str, Any]
    finished: bool
    titles: Mapping[str, str]  # metric -> title of its chart and column
    curves: Mapping[str, Points]
    development: tuple[tuple[int, float, float], ...]  # step, nDCG@10, seconds of training until then
    development_parts: Mapping[str, Mapping[int, float]]  # development collection -> step -> nDCG@10; empty if there is only one
    totals: Mapping[str, Any]  # of the whole run; empty until it is finished
    origin: Mapping[str, Mapping[str, object]]  # part of the record -> name -> value: data, versions and the like
    resumed: tuple[int, ...]  # steps
    command: str | None
    date: str  # of its end; empty until then

    @property
    def last_step(self) -> int:
        """The last known step; 0 before the first line of the log."""
        steps = [int(step) for found in self.curves.values() for step, _ in found] + [step for step, _, _ in self.development]
        return max(steps, default=0)

    @property
    def best(self) -> tuple[int, float, float] | None:
        """The best development score; ties go to the earliest."""
        return max(self.development, key=lambda scored: scored[1], default=None)


def write_training_report(folder: str | Path) -> Path:
    """Write ``report.md`` and ``report.html`` of a run into its folder, replacing existing ones."""
    return write_folder(training_report(read_run(folder)), Path(folder))


def read_run(folder: str | Path) -> TrainingRun:
    """Read a run from its folder."""
    path = Path(folder)
    if not path.is_dir():
        raise InputError(f"{path}: no such folder")
    finished = (path / RECORD).is_file()
    if not finished and not (path / RECIPE).is_file():
        raise InputError(f"{path}: not a training run, it holds neither {RECORD} nor {RECIPE}; give the --out of quiver train or pretrain")
    record = next((read_json(file) for name in (RECORD, BEGUN) if (file := path / name).is_file()), {})
    try:
        recipe = record["recipe"] if finished else read_json(path / RECIPE)
        return _run_of(recipe, record, None if finished else read_log(path / LOG) if (path / LOG).is_file() else [])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path / RECORD if finished else path}: not the record of a run of this version ({type(error).__name__}: {error})"
        ) from error


def _run_of(recipe: Mapping[str, Any], record: Mapping[str, Any], log: Sequence[Mapping[str, Any]] | None) -> TrainingRun:
    """The run of a record, whose curves are in the log as long as it is not finished."""
    pretraining, finished = recipe.get("kind") == PRETRAINING, log is None
    result: Mapping[str, Any] = record["result"] if finished else {}
    keys = (*PRETRAINING_CURVES, "tokens") if pretraining else tuple(CURVES)
    if log is not None:
        curves = {key: curve(log, key) for key in keys}
    else:
        curves = {key: result["curves"].get(key, ()) if pretraining else result[RECORDED[key]] for key in keys}
    scored = [] if pretraining else result["development"] if log is None else [line for line in log if HEADLINE in line]
    shown = TOTALS if not pretraining else tuple(result)
    return TrainingRun(
        title=f"{'Pretraining' if pretraining else 'Training'} run: {recipe['name']}",
        recipe=_name_sections(recipe) if pretraining else recipe,
        finished=finished,
        titles=PRETRAINING_CURVES if pretraining else CURVES,
        curves={key: [(int(step), float(value)) for step, value in points] for key, points in curves.items()},
        development=tuple((int(each["step"]), float(each[HEADLINE]), float(each["seconds"])) for each in scored),
        development_parts={
            key.removeprefix(PART_SCORE): {int(line["step"]): float(line[key]) for line in scored if key in line}
            for key in dict.fromkeys(key for line in scored for key in line if key.startswith(PART_SCORE))
        },
        totals={name: result[name] for name in (*shown, *(name for name in ON_GPU if name in result))} if finished else {},
        origin={name: _flatten(value) for name, value in record.items() if name not in _SHOWN_ELSEWHERE},
        resumed=tuple(map(int, result["resumed_at"])) if finished else (),
        command=record["command"] if finished else record.get("command"),
        date=record.get("date", "") if finished else "",
    )


def _name_sections(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A pretraining recipe with its lists of phases and sources as named sections."""
    data = dict(recipe["data"])
    data["sources"] = {source["name"]: {key: value for key, value in source.items() if key != "name"} for source in data["sources"]}
    shown = {name: value for name, value in recipe.items() if name not in ("phases", "data", "training")}
    phases = {f"phase {number + 1}: {phase['name']}": _phase(phase) for number, phase in enumerate(recipe["phases"])}
    return {**shown, "data": data, **phases, "training": recipe["training"]}


def _phase(phase: Mapping[str, Any]) -> dict[str, Any]:
    mix = [f"{part['source']} x {part['times']:g}" for part in phase["mix"]]
    return {**{key: value for key, value in phase.items() if key != "name"}, "mix": mix}


def _flatten(value: object, path: str = "") -> dict[str, object]:
    """Dotted path -> value of a nested mapping; a value that is no mapping is under its own name, which may be empty."""
    if not isinstance(value, Mapping):
        return {path: value}
    return {name: found for key, inner in value.items() for name, found in _flatten(inner, f"{path}.{key}" if path else str(key)).items()}


def training_report(run: TrainingRun) -> Report:
    """Make the report of a run."""
    lead = [run.recipe["description"]] if run.recipe["description"] else []
    if not run.finished:
        lead = [*lead, " ", Span("Not finished", "poor"), " The report shows what the log holds so far."]
    return Report(run.title, tuple(_run_sections(run)), lead)


def _run_sections(run: TrainingRun) -> Iterator[Section]:
    yield Section("Summary", (Properties(summary(run), "wide"),), "summary")
    if figures := tuple(_curve_figures(run)):
        resumed = " A dashed line marks a step at which the run was resumed." if run.resumed else ""
        note = f"All charts share the axis of updates. For a noisy metric, the strong line is a running mean.{resumed}"
        yield Section("Curves", (Paragraph(note), Gallery(figures)), "curves")
    if run.development:
        yield Section("Development", tuple(_development_blocks(run)), "development")
    if (log := log_table(run)).rows:
        note = "The first logged step, the last one, and others evenly between them."
        yield Section("Log", (Paragraph(note), log), "log")
    yield Section("Settings", tuple(_list_sections(settings(run))), "settings")
    if origins := _list_sections(origin(run)):
        yield Section("Data and versions", tuple(origins), "origin")
    if run.command is not None:
        yield Section("Command", (Code(run.command),), "command")


def _list_sections(parts: Mapping[str, Mapping[str, str]]) -> list[Section]:
    return [Section(name, (Properties(values),)) for name, values in parts.items()]


def _curve_figures(run: TrainingRun) -> Iterator[Figure]:
    """The curves of a run over the same steps; a metric that was not logged is left out."""
    last = max(1, run.last_step)
    drawn = [Curve(f"Development {LABELS[HEADLINE]}", [(step, value) for step, value, _ in run.development], percent=True)]
    drawn += [Curve(title, run.curves[key], percent=key in SHARES, smooth=key in NOISY) for key, title in run.titles.items()]
    for each in drawn:
        if finite(each.points):
            note = curve_note(each)
            draw = partial(curve_chart, each, last, run.resumed)
            yield Figure(each.title, draw, f"{each.title} over the updates: {note}", note)


def _development_blocks(run: TrainingRun) -> Iterator[Block]:
    development = run.recipe.get("development")
    where = f", on {_show_setting(development['data'])}, split {development['split']}" if development else ""
    mean = f" {LABELS[HEADLINE]} is the mean over the collections." if run.development_parts else ""
    yield Paragraph(f"nDCG@10 in points, by exact search{where}.{mean}")
    parts = run.development_parts
    columns = (Column("Step"), Column(LABELS[HEADLINE], ranked=True), *(Column(name) for name in parts), Column("Seconds of training"))
    rows = [
        [f"{step:,}", points(score), *(points(part.get(step)) for part in parts.values()), f"{seconds:,.0f}"]
        for step, score, seconds in run.development
    ]
    yield table(columns, rows, name="Scores on the development split")


def log_table(run: TrainingRun) -> Table:
    """At most `LINES` steps of the log: the first, the last, and others evenly between them."""
    by_step: dict[int, dict[str, float]] = {}
    titles = {key: title for key, title in run.titles.items() if run.curves[key]}
    for key in titles:
        for step, value in run.curves[key]:
            by_step.setdefault(int(step), {})[key] = value
    steps = sorted(by_step)
    if len(steps) > LINES:
        steps = [steps[round(position * (len(steps) - 1) / (LINES - 1))] for position in range(LINES)]
    rows = [[f"{step:,}", *(_format_metric(by_step[step].get(key)) for key in titles)] for step in steps]
    return table((Column("Step"), *map(Column, titles.values())), rows, name="Steps of the log")


def _format_metric(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"


def summary(run: TrainingRun) -> dict[str, str]:
    """The most important properties of a run; unknown ones are left out."""
    found = {key: [value for _, value in values] for key, values in run.curves.items()}
    pretraining = "held_out_loss" in run.titles
    losses, held_out, flops = found["loss"], found.get("held_out_loss"), found.get("flops_per_second")
    accuracy, probes, probe = found.get("held_out_accuracy"), found.get("probe_score"), run.recipe.get("probe") or {}
    share = run.totals.get("flop_utilisation")
    properties = {
        "Updates": f"{run.last_step:,}",
        "Tokens": f"{int(found['tokens'][-1]):,}" if found.get("tokens") else "",
        "Last loss": f"{losses[-1]:{'.4f' if pretraining else '.4g'}}" if losses else "",
        "Held-out loss": f"{held_out[0]:.4f}, then {held_out[-1]:.4f}" if held_out else "",
        "Held-out accuracy": f"{points(accuracy[0])}, then {points(accuracy[-1])}" if accuracy else "",
        f"Probe by {probe.get('recipe')}": f"{points(probes[0])}, then {points(probes[-1])}" if probes else "",
        f"Best {LABELS[HEADLINE]}": f"{points(run.best[1])} at step {run.best[0]:,}" if run.best else "",
        "Tokens/s, median": f"{statistics.median(speeds):,.0f}" if (speeds := found["tokens_per_second"]) else "",
        "Model FLOP/s, median": f"{statistics.median(flops):.3g}{'' if share is None else f', {share:.1%} of the peak in bfloat16'}"
        if flops
        else "",
        **(_summarize_totals(run.totals, pretraining=pretraining) if run.finished else {}),
    }
    return {name: value for name, value in properties.items() if value}


def _summarize_totals(totals: Mapping[str, Any], *, pretraining: bool) -> dict[str, str]:
    steps = ", ".join(f"{step:,}" for step in totals["kept_steps"])
    weights = f"the mean of steps {steps}" if len(totals["kept_steps"]) > 1 else f"step {steps}"
    memory = {"Peak memory": size(totals["peak_memory_bytes"])}
    if "activation_bytes" in totals:
        memory["Activations of a step"] = size(totals["activation_bytes"])
    if pretraining:
        return {
            "Packing": f"{totals['packing']:.2%} of the rows",
            "Phases end at": ", ".join(f"{phase['last_step']:,} ({phase['name']})" for phase in totals["phases"]),
            "Weights": "the moving average" if totals["average"] else weights,
            "Time": duration(totals["seconds"]),
            **memory,
        }
    texts, truncated = totals["texts"], totals["texts_truncated"]
    return {
        "Epochs": f"{totals['epochs']:.4g}",
        "Weights": weights,
        "Training time": duration(totals["seconds"]),
        "Tokens": f"{totals['tokens']:,}",
        "Texts truncated": f"{truncated:,} of {texts:,} ({truncated / texts:.1%})" if texts else "",
        **memory,
    }


def size(count: int | None) -> str:
    """Print a number of bytes with a binary unit; None is the empty string.

    Example:
        >>> size(3 * 2**20), size(65_498_251_264), size(None)
        ('3 MiB', '61 GiB', '')
    """
    if count is None:
        return ""
    exponent = max(2, min(4, (max(count, 1).bit_length() - 1) // 10))
    value = count / 2 ** (10 * exponent)
    return f"{value:.1f}".rstrip("0").rstrip(".") + f" {('MiB', 'GiB', 'TiB')[exponent - 2]}"


def duration(seconds: float) -> str:
    """Print a duration in hours, minutes and seconds.

    Example:
        >>> duration(59.6), duration(3725)
        ('1 min 0 s', '1 h 2 min 5 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    first = next((position for position, (number, _) in enumerate(parts) if number), 2)
    return " ".join(f"{number:,} {unit}" for number, unit in parts[first:])


def settings(run: TrainingRun) -> dict[str, dict[str, str]]:
    """Section of the recipe -> setting -> value, defaults included; empty values are left out."""
    found: dict[str, dict[str, str]] = {}
    for name, value in run.recipe.items():
        shown = {path: _show_setting(inner, path) for path, inner in _flatten(value).items()}
        if isinstance(value, Mapping):
            found[name] = {path: text for path, text in shown.items() if text}
        elif shown[""]:
            found.setdefault("recipe", {})[name] = shown[""]
    return found


def origin(run: TrainingRun) -> dict[str, dict[str, str]]:
    """Part of the record -> name -> value."""
    parts = {
        name: {path if name == "versions" else _label_key(path or name): _show_setting(inner, path) for path, inner in value.items()}
        for name, value in run.origin.items()
    }
    together = {"Date": run.date} | {name: text for part in parts.values() if len(part) == 1 for name, text in part.items()}
    shown = {_label_key(name): part for name, part in parts.items() if len(part) > 1} | {"Machine": together}
    known = {name: {key: text for key, text in part.items() if text} for name, part in shown.items()}
    return {name: part for name, part in known.items() if part}


def _label_key(name: str) -> str:
    """A key of the record in words.

    Example:
        >>> _label_key("data.rows_skipped"), _label_key("sha256")
        ('Data rows skipped', 'sha256')
    """
    words = name.replace("_", " ").replace(".", " ").strip()
    return words if words[-1:].isdigit() else words[:1].upper() + words[1:]


def _show_setting(value: object, name: str = "") -> str:
    if value is None or value == "" or value == [] or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if name.endswith("seed") else f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() or abs(value) >= 10_000 else f"{value:.6g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_show_setting(each) for each in value)
    return str(value)


REPORT, PLOT = "sweep.md", "sweep.svg"
"""Files of `write_sweep_report`, beside sweep.json."""


def write_sweep_report(sweep: Sweep, folder: str | Path) -> list[Path]:
    """Write ``sweep.md`` and, once a run is finished, ``sweep.svg``, replacing existing files."""
    target = Path(folder)
    write(sweep_report(sweep, target), target / REPORT)
    return [target / name for name in ((REPORT, PLOT) if _charted_measure(sweep) is not None else (REPORT,))]


def _charted_measure(sweep: Sweep) -> Measure | None:
    """The first measure that is a fraction and that a candidate has."""
    return next((each for each in sweep.measures if each.in_points and any(each.key in one.scores for one in sweep.candidates)), None)


def train_command(sweep: Sweep, out: str | Path) -> str:
    """The command that trains the best candidate again."""
    if sweep.best is None:
        raise ValueError("no candidate of this sweep has all its runs yet")
    return shlex.join(["quiver", *sweep.trained_by.split(), sweep.recipe, "--out", str(out), *sweep.best.overrides])


def sweep_report(sweep: Sweep, folder: Path) -> Report:
    """Make the report of a sweep; fractions in points, their hundredths."""
    counts = {status: sum(run.status == status for run in sweep.runs) for status in ("finished", "failed", "waiting")}
    statuses = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    seeds = ", the mean over the seeds" if SEED in sweep.axes else ""
    blocks: list[Block] = [
        Paragraph(f"{len(sweep.runs)} runs: {statuses}. Selected by {sweep.measures[0].label} on {sweep.scored_on}{seeds}."),
        candidate_table(sweep),
    ]
    if sweep.best is not None:
        blocks.append(
            Section(
                f"The best: {show_settings(sweep.best.settings) or 'the recipe'}", tuple(_best_blocks(sweep, sweep.best, folder)), "best"
            )
        )
    if (measure := _charted_measure(sweep)) is not None:
        scored = [candidate for candidate in sweep.candidates if candidate.scores]
        title = f"{measure.label} of the candidates"
        values = ", ".join(f"{show_settings(each.settings) or 'the recipe'} {measure.show(each.mean(measure))}" for each in scored)
        blocks.append(Figure(title, partial(sweep_chart, sweep, scored, measure), f"{title}: {values}", file=PLOT))
    if failed := [[run.folder, run.error or ""] for run in sweep.runs if run.error is not None]:
        errors = table((Column("Run", numeric=False), Column("Error", numeric=False)), failed, name="Failed runs")
        again = Paragraph("Run the command of the sweep again to retry them.")
        blocks.append(Section("Failed", (errors, again), "failed"))
    if sweep.command:
        blocks.append(Section("Command", (Code(sweep.command),), "command"))
    return Report(f"Sweep of {sweep.name}", tuple(blocks))


def _best_blocks(sweep: Sweep, best: Candidate, folder: Path) -> Iterator[Block]:
    models = [part for run in best.folders for part in (", ", Span(f"{run}/model", "code"))][1:]
    yield Paragraph(("Trained models: ", *models, ". To train it again:"))
    yield Code(train_command(sweep, folder / "best"))
    yield from map(Paragraph, cautions(sweep))


def cautions(sweep: Sweep) -> list[str]:
    """Reasons to doubt the best candidate: it is at the end of an axis, or the gap to others is within the noise of the seeds."""
    best = sweep.best
    if best is None:
        return []
    found = []
    for path, values in sweep.axes.items():
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        if path != SEED and len(numbers) == len(values) > 1 and best.settings[path] in (min(numbers), max(numbers)):
            end = "highest" if best.settings[path] == max(numbers) else "lowest"
            found.append(f"{path}={show_value(best.settings[path])} is the {end} value of the sweep; a value beyond it may be better.")
    measure = sweep.measures[0]
    close = [other for other in sweep.candidates[1:] if not other.missing and _within_noise(best, other, measure)]
    if close:
        names = "; ".join(show_settings(other.settings) for other in close)
        found.append(f"Less than two standard errors behind: {names}. More seeds would separate them.")
    if best.deviation(measure) is None and len(sweep.candidates) > 1:
        alone = "The best has one seed" if SEED in sweep.axes else "One seed per candidate"
        found.append(f"{alone}: the variation between seeds is unknown. Add training.seed=1,2,3 as an axis.")
    return found


def _within_noise(best: Candidate, other: Candidate, measure: Measure) -> bool:
    deviations, means = [each.deviation(measure) for each in (best, other)], [each.mean(measure) for each in (best, other)]
    if None in deviations or None in means:
        return False
    sizes = [len(each.scores[measure.key]) for each in (best, other)]
    error = math.hypot(*(float(deviation or 0) / math.sqrt(size) for deviation, size in zip(deviations, sizes, strict=True)))
    return abs(float(means[0] or 0) - float(means[1] or 0)) < 2 * error


def candidate_table(sweep: Sweep) -> Table:
    """The candidates, best first, with their scores; fractions in points."""
    axes = [path for path in sweep.axes if path != SEED]
    labels, listed, seeds = short_names(axes), RUN in axes, SEED in sweep.axes
    columns = [Column("Rank", numeric=False), *(Column(labels[path], numeric=False) for path in axes)]
    columns += [Column("Changes", numeric=False)] if listed else []
    for measure in sweep.measures:
        columns += [
            Column(measure.label, ranked=not measure.lower_is_better),
            *([Column("Deviation"), Column("By seed", numeric=False)] * seeds),
        ]
    rows = []
    for position, candidate in enumerate(sweep.candidates, start=1):
        cells = [show_value(candidate.settings[path]) for path in axes]
        cells += [" ".join(each for each in candidate.overrides if each not in sweep.fixed)] if listed else []
        for measure in sweep.measures:
            cells.append(measure.show(candidate.mean(measure)))
            by_seed = " ".join(map(measure.show, candidate.scores.get(measure.key, ())))
            cells += [measure.show(candidate.deviation(measure)), by_seed] if seeds else []
        rows.append([str(position) if not candidate.missing else "incomplete", *cells])
    return table(columns, rows, name="Candidates")


def sweep_chart(sweep: Sweep, scored: Sequence[Candidate], measure: Measure) -> Drawing:
    """Draw a measure, a fraction, over the learning rate, one line per combination of the other settings; small rings are single seeds.

    If the sweep has no axis of learning rates, the candidates are bars.
    """
    if len(sweep.axes.get(LEARNING_RATE, ())) > 1:
        return _line_chart(sweep, scored, measure)
    bars = [Bar(Key("", 1, show_settings(each.settings) or "the recipe"), each.mean(measure) or 0.0) for each in scored]
    return bar_chart(bars, axis_top(max(bar.value for bar in bars)))


def _line_chart(sweep: Sweep, scored: Sequence[Candidate], measure: Measure) -> Drawing:
    groups: dict[str, list[Candidate]] = {}
    for each in scored:
        others = {path: value for path, value in each.settings.items() if path != LEARNING_RATE}
        groups.setdefault(show_settings(others), []).append(each)
    with style():
        legend = 0.2 * len(groups) if any(groups) else 0.0
        figure = new_figure(WIDTH, 2.9 + legend, layout="constrained")
        axes = figure.add_subplot()
        for position, (label, members) in enumerate(groups.items()):
            colour = PALETTE[1 + position % (len(PALETTE) - 1)]
            ordered = sorted(members, key=lambda each: _rate_of(each.settings))
            means = [(_rate_of(each.settings), 100 * (each.mean(measure) or 0.0)) for each in ordered]
            shown = fit(visible(label), 48) or None
            axes.plot(*zip(*means, strict=True), color=colour, marker="o", markersize=5, linewidth=1.4, label=shown)
            seeds = [
                (_rate_of(each.settings), 100 * score) for each in ordered for score in each.scores[measure.key] if each.deviation(measure)
            ]
            axes.plot([x for x, _ in seeds], [y for _, y in seeds], color=colour, marker="o", mfc="none", markersize=3.5, linestyle="none")
        rates = sorted(float(rate) for rate in sweep.axes[LEARNING_RATE] if isinstance(rate, int | float))
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(rates, [show_value(rate) for rate in rates], rotation=30 if len(rates) > 6 else 0)
        axes.locator_params(axis="y", nbins=5)
        axes.tick_params(length=0)
        axes.set_xlabel("learning rate", loc="right")
        axes.set_title(measure.label, loc="left", fontsize=9)
        if any(groups):
            figure.legend(loc="outside lower left", fontsize=8, frameon=False)
        return figure


def _rate_of(settings: Mapping[str, Value]) -> float:
    rate = settings[LEARNING_RATE]
    return float(rate) if isinstance(rate, int | float) else math.nan
