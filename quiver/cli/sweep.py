"""``quiver sweep``: like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import JsonOption, OverwriteOption, ProgressOption, command_line, print_table, say, say_error, show_progress
from quiver.encoder import InputError
from quiver.eval.development import development_scorer
from quiver.eval.report.sweep import cautions, train_command, write_sweep_report
from quiver.retrieval.training.grid import make_grid, show_settings
from quiver.retrieval.training.run import RunStoppedError
from quiver.retrieval.training.run import train as train_recipe
from quiver.retrieval.training.sections import Recipe
from quiver.retrieval.training.sweep import RECORD, Sweep, run_sweep


def sweep(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe; it needs a development section.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: a folder a run, sweep.json, sweep.md and sweep.svg.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="section.setting=value,value to sweep over; section.setting=value for all. Default: the paper's learning rates."
        ),
    ] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Train a recipe with every combination of some settings and select the best on its development collection.

    Stopped half-way, the same command goes on where it was; values may be added to a sweep later. Seeds are no candidates: what is
    compared are means over them.

    Example: quiver sweep recipes/pycodesearch-dense.yaml --out sweeps/pycodesearch training.learning_rate=3e-5,8e-5 training.seed=1,2
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            "a sweep trains in one process: start it without torchrun, or train its runs one by one with torchrun and quiver train"
        )
    grid = make_grid(recipe, settings or [])
    development = grid.runs[0].recipe.development
    if development is None:  # make_grid asks for one
        raise ValueError("the runs of a sweep have a development section")
    watched = show_progress(progress)
    scorer = development_scorer(development, progress=watched)

    def train(recipe: Recipe, out: Path, *, resume: bool, data_folder: Path) -> None:
        train_recipe(recipe, out, resume=resume, progress=watched, command=command_line(), scorer=scorer, data_folder=data_folder)

    def report(sweep: Sweep) -> None:
        write_sweep_report(sweep, out)

    tell = (lambda line: typer.echo(line, err=True)) if watched else lambda line: None
    try:
        found = run_sweep(grid, out, train=train, overwrite=overwrite, command=command_line(), tell=tell, changed=report)
    except RunStoppedError as stopped:
        remedy = "the same command without --overwrite goes on" if overwrite else "the same command goes on"
        say_error(f"{stopped}; {remedy}")
        raise typer.Exit(1) from stopped
    if as_json:
        say((out / RECORD).read_text(encoding="utf-8").rstrip())
    else:
        _print(found, out)
    if failed := [run for run in found.runs if run.error is not None]:
        say_error(
            f"{len(failed)} of {len(found.runs)} runs failed, {failed[0].folder} with: {failed[0].error}; the same command tries again"
        )
        raise typer.Exit(1)


def _print(sweep: Sweep, out: Path) -> None:
    rows = [
        (
            show_settings(candidate.settings) or "the recipe",
            "" if candidate.mean is None else f"{candidate.mean:.4f}",
            "" if candidate.deviation is None else f"{candidate.deviation:.4f}",
            str(len(candidate.scores)),
        )
        for candidate in sweep.candidates
    ]
    where = f"{sweep.development['data']}, split {sweep.development['split']}"
    print_table(f"nDCG@10 on {where}", ("candidate", "mean", "deviation", "runs"), rows)
    for caution in cautions(sweep):
        say(caution)
    if sweep.best is not None:
        say(f"best: {', '.join(str(out / folder / 'model') for folder in sweep.best.folders)}")
        say(f"to train it again: {train_command(sweep, out / 'best')}")
    say(f"report: {out / 'sweep.md'}")
