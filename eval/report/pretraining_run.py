"""A pretraining run to read: loss, held-out loss, gradient norm, throughput and packing over the updates, and what the run was made of.

Works on a finished run, from its ``run.json``, and on one that is going on or was stopped, from its recipe and the log that it appends to.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.pretraining.record import curves
from quiver.encoder.training.run_folder import BEGUN, RECIPE, RECORD, SCHEMA
from quiver.eval.report.html import render_page
from quiver.eval.report.run_files import write_both
from quiver.eval.report.tables import escape, table
from quiver.eval.report.training_run import TrainingRun, charts, duration, flat, log_lines, origins, page_table, settings, size

TITLES: Mapping[str, str] = {
    "loss": "Loss",
    "held_out_loss": "Held-out loss",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens/s",
    "flops_per_second": "Model FLOP/s",
    "packing": "Packing",
    "learning_rate": "Learning rate",
    "batch_size": "Batch, sequences of full context",
}
"""Key of a line of the log -> what a chart and a column call it."""

_TOLD_APART = ("recipe", "result", "command", "date", "schema")


def is_pretraining(folder: str | Path) -> bool:
    """Whether a folder is that of a pretraining run, finished or not."""
    found = next((file for name in (RECORD, BEGUN) if (file := Path(folder) / name).is_file()), None)
    return found is not None and read_json(found).get("schema") == SCHEMA


def write_pretraining_report(folder: str | Path) -> Path:
    """Write ``report.md`` and ``report.html`` of a run into its folder; those already there are replaced.

    Args:
        folder: What ``quiver pretrain`` wrote, or is writing.

    Returns:
        The page; without jinja2, which it needs, the Markdown alone, and a warning in the log.

    Raises:
        InputError: The folder holds no run, its record or log is damaged, or the report cannot be written.
    """
    run = read_pretraining(folder)
    return write_both(Path(folder), render_pretraining(run), lambda: render_pretraining_page(run))


def read_pretraining(folder: str | Path) -> TrainingRun:
    """A run from its folder.

    Raises:
        InputError: There is neither a record nor a recipe, or a file is damaged.
    """
    place = Path(folder)
    if not (place / RECIPE).is_file():
        raise InputError(f"{place}: no pretraining run, it holds no {RECIPE}; give the --out of quiver pretrain")
    finished = (place / RECORD).is_file()
    record = read_json(place / RECORD) if finished else read_json(place / BEGUN) if (place / BEGUN).is_file() else {}
    try:
        result: Mapping[str, Any] = record["result"] if finished else {"resumed_at": [], "curves": curves(place)}
        return TrainingRun(
            recipe=_by_name(record["recipe"] if finished else read_json(place / RECIPE)),
            finished=finished,
            curves={key: [(int(step), float(value)) for step, value in result["curves"].get(key, ())] for key in (*TITLES, "tokens")},
            development=(),
            totals=result if finished else {},
            origin={name: flat(value) for name, value in record.items() if name not in _TOLD_APART},
            resumed=tuple(map(int, result["resumed_at"])),
            command=record.get("command"),
            date=record.get("date", ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{place}: not the record of a pretraining run of this version ({type(error).__name__}: {error})") from error


def _by_name(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with sections of their own for phases and sources, which are lists in it."""
    data = dict(recipe["data"])
    data["sources"] = {source["name"]: {key: value for key, value in source.items() if key != "name"} for source in data["sources"]}
    shown = {name: value for name, value in recipe.items() if name not in ("phases", "data", "training")}
    phases = {f"phase {number + 1}: {phase['name']}": _phase(phase) for number, phase in enumerate(recipe["phases"])}
    return {**shown, "data": data, **phases, "training": recipe["training"]}


def _phase(phase: Mapping[str, Any]) -> dict[str, Any]:
    mix = [f"{part['source']} x {part['times']:g}" for part in phase["mix"]]
    return {**{key: value for key, value in phase.items() if key != "name"}, "mix": mix}


def summary(run: TrainingRun) -> dict[str, str]:
    """What somebody wants to know first; what is not known is left out."""
    found = {key: [value for _, value in points] for key, points in run.curves.items()}
    facts = {
        "Updates": f"{run.last_step:,}",
        "Tokens": f"{int(found['tokens'][-1]):,}" if found["tokens"] else "",
        "Last loss": f"{found['loss'][-1]:.4f}" if found["loss"] else "",
        "Held-out loss": f"{found['held_out_loss'][0]:.4f}, then {found['held_out_loss'][-1]:.4f}" if found["held_out_loss"] else "",
        "Tokens/s, median": f"{statistics.median(found['tokens_per_second']):,.0f}" if found["tokens_per_second"] else "",
        "Model FLOP/s, median": _flops(found["flops_per_second"], run.totals.get("flop_utilisation")),
        **(_totals(run.totals) if run.finished else {}),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _flops(per_second: Sequence[float], utilisation: float | None) -> str:
    if not per_second:
        return ""
    return f"{statistics.median(per_second):.3g}{'' if utilisation is None else f', {utilisation:.1%} of the peak in bfloat16'}"


def _totals(result: Mapping[str, Any]) -> dict[str, str]:
    steps = ", ".join(f"{step:,}" for step in result["kept_steps"])
    mean = "the moving average" if result["average"] else f"the mean of steps {steps}" if len(result["kept_steps"]) > 1 else f"step {steps}"
    return {
        "Packing": f"{result['packing']:.2%} of the rows",
        "Phases end at": ", ".join(f"{phase['last_step']:,} ({phase['name']})" for phase in result["phases"]),
        "Weights": mean,
        "Time": duration(result["seconds"]),
        "Peak memory": size(result["peak_memory_bytes"]),
    }


def render_pretraining(run: TrainingRun) -> str:
    """A run as Markdown."""
    parts = [f"# Pretraining run: {escape(str(run.recipe['name']))}", escape(run.recipe["description"])]
    if not run.finished:
        parts.append("**Not finished.** What follows is what the log holds so far.")
    parts.append(table(["", ""], [list(fact) for fact in summary(run).items()]))
    if any(run.curves.values()):
        parts.append(f"## Log\n\n{table(*log_lines(run, TITLES))}")
    for section, values in settings(run).items():
        parts.append(f"## Settings: {escape(section)}\n\n{table(['Setting', 'Value'], [list(each) for each in values.items()])}")
    for part, values in origins(run).items():
        parts.append(f"## {escape(part)}\n\n{table(['', ''], [list(each) for each in values.items()])}")
    if run.command is not None:
        parts += ["## Command", "    " + run.command.replace("\n", "\n    ")]
    return "\n\n".join(parts) + "\n"


def render_pretraining_page(run: TrainingRun) -> str:
    """A run as one HTML page, under the rules of `quiver.eval.report.html`; equal runs give equal bytes.

    Raises:
        InputError: jinja2 is not installed.
    """
    content = {
        "run": run,
        "summary": summary(run),
        "charts": charts(run, TITLES),
        "log": page_table("Steps of the log", *log_lines(run, TITLES)),
        "settings": settings(run),
        "origins": origins(run),
    }
    return render_page("training.html.j2", content, title=f"Pretraining run: {run.recipe['name']}")
