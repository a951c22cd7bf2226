"""A training run to read: how the loss, the learning rate, the speed and the development score went, and what the run was made of.

Works on a finished run, from its ``run.json``, and on one that is going on or was stopped, from what it was begun with and the log that
it appends to. No number is added that is not in them, except running means and medians, which are named so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.training.log import LOG, curve, read_log
from quiver.eval.report.curves import Curve, CurveChart, Points, curve_chart
from quiver.eval.report.html import render_page
from quiver.eval.report.page_tables import Cell, Column, Table
from quiver.eval.report.run_files import write_both
from quiver.eval.report.systems import LABELS, points
from quiver.eval.report.tables import escape, table
from quiver.eval.results import HEADLINE
from quiver.retrieval.training.run_folder import BEGUN, RECIPE, RECORD

CURVES: Mapping[str, str] = {
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens/s",
}
"""Key of a line of the log -> what a chart and a column call it."""

RECORDED: Mapping[str, str] = {
    "loss": "losses",
    "learning_rate": "learning_rates",
    "grad_norm": "grad_norms",
    "tokens_per_second": "tokens_per_second",
}
"""Key of a line of the log -> key of ``result`` in ``run.json``, which holds the same as [step, value] pairs."""

NOISY = ("loss", "grad_norm", "tokens_per_second")
"""Curves that get a running mean."""

SHARES = ("packing",)
"""Curves of fractions that are shown in points, hundredths."""

LINES = 20
"""Lines of the log that a table shows, evenly spread."""

TOTALS = ("epochs", "kept_steps", "texts", "texts_truncated", "tokens", "seconds", "peak_memory_bytes")
"""Keys of ``result`` that count over the whole run."""

_TOLD_APART = ("recipe", "result", "command", "date", "schema")


@dataclass(frozen=True)
class TrainingRun:
    """What a report shows of a run.

    Attributes:
        recipe: As it was resolved.
        finished: Whether the run has come to its end.
        curves: Key of ``CURVES`` -> (step, value).
        development: (step, nDCG@10 as a fraction, seconds of training until then).
        totals: Key of ``TOTALS`` -> what was counted; empty until it is finished.
        origin: Part of the record -> name -> value: data, versions and the like, as far as they are known.
        resumed: Steps at which it went on after a stop.
        command: The command line that started it, if it is known.
        date: When it ended; empty until then.
    """

    recipe: Mapping[str, Any]
    finished: bool
    curves: Mapping[str, Points]
    development: tuple[tuple[int, float, float], ...]
    totals: Mapping[str, Any]
    origin: Mapping[str, Mapping[str, object]]
    resumed: tuple[int, ...]
    command: str | None
    date: str

    @property
    def last_step(self) -> int:
        """The last update that is known of; 0 before the first line of the log."""
        steps = [int(step) for found in self.curves.values() for step, _ in found] + [step for step, _, _ in self.development]
        return max(steps, default=0)

    @property
    def best(self) -> tuple[int, float, float] | None:
        """The best development score, the first of equals."""
        return max(self.development, key=lambda scored: scored[1], default=None)


def write_run_report(folder: str | Path) -> Path:
    """Write ``report.md`` and ``report.html`` of a run into its folder; those already there are replaced.

    Args:
        folder: What ``quiver train`` wrote, or is writing.

    Returns:
        The page; without jinja2, which it needs, the Markdown alone, and a warning in the log.

    Raises:
        InputError: The folder holds no run, its record or log is damaged, or the report cannot be written.
    """
    run = read_run(folder)
    return write_both(Path(folder), render_run(run), lambda: render_run_page(run))


def read_run(folder: str | Path) -> TrainingRun:
    """A run from its folder.

    Args:
        folder: What ``quiver train`` wrote, or is writing.

    Raises:
        InputError: There is neither a record nor a recipe, or a file is damaged.
    """
    place = Path(folder)
    if (place / RECORD).is_file():
        return _finished(read_json(place / RECORD), f"{place / RECORD}")
    if not (place / RECIPE).is_file():
        raise InputError(f"{place}: no training run, it holds neither {RECORD} nor {RECIPE}; give the --out of quiver train")
    lines = read_log(place / LOG) if (place / LOG).is_file() else []
    begun = read_json(place / BEGUN) if (place / BEGUN).is_file() else {}
    return TrainingRun(
        recipe=read_json(place / RECIPE),
        finished=False,
        curves={key: curve(lines, key) for key in CURVES},
        development=tuple((int(line["step"]), float(line[HEADLINE]), float(line["seconds"])) for line in lines if HEADLINE in line),
        totals={},
        origin=_origin(begun),
        resumed=(),
        command=begun.get("command"),
        date="",
    )


def _finished(record: Mapping[str, Any], where: str) -> TrainingRun:
    try:
        result = record["result"]
        curves = {key: [(int(step), float(value)) for step, value in result[name]] for key, name in RECORDED.items()}
        development = tuple((int(each["step"]), float(each[HEADLINE]), float(each["seconds"])) for each in result["development"])
        return TrainingRun(
            recipe=record["recipe"],
            finished=True,
            curves=curves,
            development=development,
            totals={name: result[name] for name in TOTALS},
            origin=_origin(record),
            resumed=tuple(map(int, result["resumed_at"])),
            command=record["command"],
            date=record["date"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: not the record of a training run of this version ({type(error).__name__}: {error})") from error


def flat(value: object, path: str = "") -> dict[str, object]:
    """Dotted path -> what stands there; a value that is no mapping stands under its own name, which may be empty."""
    if not isinstance(value, Mapping):
        return {path: value}
    return {name: found for key, inner in value.items() for name, found in flat(inner, f"{path}.{key}" if path else str(key)).items()}


def _origin(record: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    return {name: flat(value) for name, value in record.items() if name not in _TOLD_APART}


def summary(run: TrainingRun) -> dict[str, str]:
    """What somebody wants to know first; what is not known is left out."""
    losses = [value for _, value in run.curves["loss"]]
    speeds = [value for _, value in run.curves["tokens_per_second"]]
    facts = {
        "Updates": f"{run.last_step:,}",
        "Last loss": f"{losses[-1]:.4g}" if losses else "",
        f"Best {LABELS[HEADLINE]}": f"{points(run.best[1])} at step {run.best[0]:,}" if run.best else "",
        "Tokens/s, median": f"{statistics.median(speeds):,.0f}" if speeds else "",
        **(_totals(run) if run.finished else {}),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _totals(run: TrainingRun) -> dict[str, str]:
    totals, kept = run.totals, run.totals["kept_steps"]
    texts, cut = totals["texts"], totals["texts_truncated"]
    steps = ", ".join(f"{step:,}" for step in kept)
    return {
        "Epochs": f"{totals['epochs']:.4g}",
        "Weights": f"the mean of steps {steps}" if len(kept) > 1 else f"step {steps}",
        "Training time": duration(totals["seconds"]),
        "Tokens": f"{totals['tokens']:,}",
        "Texts cut": f"{cut:,} of {texts:,} ({cut / texts:.1%})" if texts else "",
        "Peak memory": size(totals["peak_memory_bytes"]),
    }


def size(count: int | None) -> str:
    """Bytes as people say them; empty where they are not known.

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
    """Seconds as people say them.

    Example:
        >>> duration(59.6), duration(3725)
        ('1 min 0 s', '1 h 2 min 5 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    first = next((place for place, (number, _) in enumerate(parts) if number), 2)
    return " ".join(f"{number:,} {unit}" for number, unit in parts[first:])


def charts(run: TrainingRun, titles: Mapping[str, str] = CURVES) -> list[CurveChart]:
    """The curves of a run, all over the same steps; what was not logged is left out.

    Args:
        run: Whose.
        titles: Key of its curves -> what a chart calls it, in the order of the charts.
    """
    last = max(1, run.last_step)
    drawn = [Curve(f"Development {LABELS[HEADLINE]}", [(step, value) for step, value, _ in run.development], percent=True)]
    drawn += [Curve(title, run.curves[key], percent=key in SHARES, smooth=key in NOISY) for key, title in titles.items()]
    return [chart for chart in (curve_chart(each, last, run.resumed) for each in drawn) if chart is not None]


def settings(run: TrainingRun) -> dict[str, dict[str, str]]:
    """Section of the recipe -> setting -> value, defaults too; what is null or empty is left out."""
    found: dict[str, dict[str, str]] = {}
    for name, value in run.recipe.items():
        shown = {path: _shown(inner, path) for path, inner in flat(value).items()}
        if isinstance(value, Mapping):
            found[name] = {path: text for path, text in shown.items() if text}
        elif shown[""]:
            found.setdefault("recipe", {})[name] = shown[""]
    return found


def origins(run: TrainingRun) -> dict[str, dict[str, str]]:
    """Part of the record -> name -> value."""
    parts = {
        name: {path if name == "versions" else _label(path or name): _shown(inner, path) for path, inner in value.items()}
        for name, value in run.origin.items()
    }
    together = {"Date": run.date} | {name: text for part in parts.values() if len(part) == 1 for name, text in part.items()}
    shown = {_label(name): part for name, part in parts.items() if len(part) > 1} | {"Where": together}
    known = {name: {key: text for key, text in part.items() if text} for name, part in shown.items()}
    return {name: part for name, part in known.items() if part}


def _label(name: str) -> str:
    """A key of the record as words.

    Example:
        >>> _label("data.rows_skipped"), _label("sha256")
        ('Data rows skipped', 'sha256')
    """
    words = name.replace("_", " ").replace(".", " ").strip()
    return words if words[-1:].isdigit() else words[:1].upper() + words[1:]


def _shown(value: object, name: str = "") -> str:
    if value is None or value == "" or value == [] or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if name.endswith("seed") else f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() or abs(value) >= 10_000 else f"{value:.6g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_shown(each) for each in value)
    return str(value)


def log_lines(run: TrainingRun, titles: Mapping[str, str] = CURVES) -> tuple[list[str], list[list[str]]]:
    """Header and rows of at most `LINES` steps of the log: the first, the last, and others evenly between them.

    Args:
        run: Whose.
        titles: Key of its curves -> what a column calls it.
    """
    by_step: dict[int, dict[str, float]] = {}
    for key in titles:
        for step, value in run.curves[key]:
            by_step.setdefault(int(step), {})[key] = value
    steps = sorted(by_step)
    if len(steps) > LINES:
        steps = [steps[round(place * (len(steps) - 1) / (LINES - 1))] for place in range(LINES)]
    rows = [[f"{step:,}", *(_figure(by_step[step].get(key)) for key in titles)] for step in steps]
    return ["Step", *titles.values()], rows


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"


def development_lines(run: TrainingRun) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the development scores."""
    header = ["Step", LABELS[HEADLINE], "Seconds of training"]
    return header, [[f"{step:,}", points(score), f"{seconds:,.0f}"] for step, score, seconds in run.development]


def render_run(run: TrainingRun) -> str:
    """A run as Markdown."""
    return "\n\n".join(_markdown(run)) + "\n"


def _markdown(run: TrainingRun) -> Iterator[str]:
    yield f"# Training run: {escape(_name(run))}"
    yield escape(run.recipe["description"])
    if not run.finished:
        yield "**Not finished.** What follows is what the log holds so far."
    yield table(["", ""], [list(fact) for fact in summary(run).items()])
    if run.development:
        yield f"## Development\n\n{table(*development_lines(run))}"
    if any(run.curves.values()):
        yield f"## Log\n\n{table(*log_lines(run))}"
    for section, values in settings(run).items():
        yield f"## Settings: {escape(section)}\n\n{table(['Setting', 'Value'], [list(each) for each in values.items()])}"
    for part, values in origins(run).items():
        yield f"## {escape(part)}\n\n{table(['', ''], [list(each) for each in values.items()])}"
    if run.command is not None:
        yield "## Command"
        yield "    " + run.command.replace("\n", "\n    ")


def render_run_page(run: TrainingRun) -> str:
    """A run as one HTML page, under the rules of `quiver.eval.report.html`; equal runs give equal bytes.

    Raises:
        InputError: jinja2 is not installed.
    """
    content = {
        "run": run,
        "summary": summary(run),
        "charts": charts(run),
        "development": page_table("Scores on the development split", *development_lines(run), best=run.best),
        "log": page_table("Steps of the log", *log_lines(run)),
        "settings": settings(run),
        "origins": origins(run),
    }
    return render_page("training.html.j2", content, title=f"Training run: {_name(run)}")


def page_table(name: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, best: tuple[int, float, float] | None = None) -> Table:
    """Header and rows as a table of a page; the best score, if there is one, is marked."""
    marked = None if best is None else points(best[1])
    lines = [tuple(Cell(text, _order(text), best=text == marked and place == 1) for place, text in enumerate(row)) for row in rows]
    return Table(name, tuple(map(Column, header)), tuple(lines))


def _order(text: str) -> float | None:
    return float(text.replace(",", "")) if text else None


def _name(run: TrainingRun) -> str:
    return str(run.recipe["name"])
