"""``quiver report``: results to tables, pages and metadata; like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quiver.cli.output import JsonOption, help_alone, print_json, print_table, say
from quiver.encoder import InputError
from quiver.eval.report.compare import Comparison, compare_results
from quiver.eval.report.pretraining_run import is_pretraining, write_pretraining_report
from quiver.eval.report.systems import LABELS
from quiver.eval.report.training_run import write_run_report
from quiver.eval.report.writing import check_comparison_target, write_card, write_comparison, write_mteb, write_paper, write_report
from quiver.eval.results import HEADLINE


class _FoldersFirst(TyperGroup):
    """A family whose first argument may be a folder: ``quiver report DIR...`` means ``quiver report write DIR...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["write", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=_FoldersFirst,
    invoke_without_command=True,
    callback=help_alone,
    help="Turn results into reports; a folder as first argument means write (a folder called compare is ./compare).",
    epilog="Example: quiver report results/a results/b --out report.html",
)

FoldersArgument = typer.Argument(help="Folders that quiver evaluate wrote.")
FolderArgument = typer.Argument(help="A folder that quiver evaluate wrote.")


class Layout(str, Enum):
    """How a report is laid out."""

    RESULTS = "results"
    PAPER = "paper"


class Card(str, Enum):
    """Which metadata of the Hugging Face Hub."""

    MODEL_INDEX = "model-index"
    EVAL_RESULTS = "eval-results"


@app.command("write", epilog="Example: quiver report write results/a results/b --layout paper --against ModernBERT-base --out table7.tex")
def write(
    folders: Annotated[list[Path], FoldersArgument],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file; .md, .html or .tex says what it is.")],
    layout: Annotated[Layout, typer.Option(help="Own tables, or the ModernBERT paper's with its rows.")] = Layout.RESULTS,
    against: Annotated[str | None, typer.Option(help="With paper: a row such as ModernBERT-base to take the difference to.")] = None,
) -> None:
    """Put results of one or more systems into one report."""
    if layout is Layout.PAPER:
        write_paper(folders, out, against=against)
    elif against is not None:
        raise InputError("--against names a row of the paper; it needs --layout paper")
    else:
        write_report(folders, out)
    say(f"report: {out}")


@app.command("compare", epilog="Example: quiver report compare results/a results/b --out comparison.md")
def compare(
    baseline: Annotated[str, typer.Argument(help="A folder of results, or bm25: the baseline that each folder holds itself.")],
    systems: Annotated[list[Path], typer.Argument(help="Folders of results to compare with it.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A Markdown file, .md: all measures, p, what changed most.")] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Say which differences are more than chance: paired tests over the queries, corrected for their number."""
    if out is not None:
        check_comparison_target(out)
    comparison = compare_results(baseline, *systems)
    if out is not None:
        write_comparison(comparison, out)
    if as_json:
        print_json(dataclasses.asdict(comparison))
        return
    _print_comparison(comparison)
    if out is not None:
        say(f"comparison: {out}")


def _print_comparison(comparison: Comparison) -> None:
    """The headline alone, which fits a terminal; all measures, p and the queries that changed are in the file."""
    for system in comparison.systems:
        rows = []
        for pairing in (*comparison.pairings, *comparison.averages):
            if pairing.system == system and HEADLINE in pairing.measures:
                measured = pairing.measures[HEADLINE]
                paired, between = measured.paired, measured.paired.interval
                scores = (f"{100 * value:.2f}" for value in (paired.first, paired.second))
                interval = f"{100 * between.low:+.1f} to {100 * between.high:+.1f}"
                verdict = "unclear" if measured.verdict == "not significant" else measured.verdict
                rows.append((pairing.data_set, *scores, f"{100 * paired.difference:+.2f}", interval, verdict))
        title = f"{LABELS[HEADLINE]} of {system}, compared with {comparison.baseline}"
        print_table(title, ("collection", "before", "now", "change", "95% interval", "verdict"), rows)
    for each in comparison.unpaired:
        say(f"not compared: {each.collection}, on which {each.lacks} was not evaluated")


@app.command("card", epilog="Example: quiver report card results/a --out model-index.yaml")
def card(
    folder: Annotated[Path, FolderArgument],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write, .yaml or .yml; one that holds anything else is left alone.")],
    kind: Annotated[
        Card, typer.Option(help="model-index: metadata to copy into a model card; eval-results: a file for .eval_results/.")
    ] = Card.MODEL_INDEX,
) -> None:
    """Write results as metadata of a model on the Hugging Face Hub."""
    write_card(folder, out, kind=kind.value)
    say(f"metadata: {out}")


@app.command("mteb", epilog="Example: quiver report mteb results/a --out mteb-results/model/revision")
def mteb(
    folder: Annotated[Path, FolderArgument],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for one file a task.")],
) -> None:
    """Write results as files in mteb's shape."""
    files, without = write_mteb(folder, out)
    say(f"{len(files)} tasks: {out}")
    if without:
        say(f"left out, for mteb has no task for them or scores them otherwise: {', '.join(map(repr, without))}")


@app.command("training", epilog="Example: quiver report training runs/mine")
def training(folder: Annotated[Path, typer.Argument(help="The --out of quiver train or pretrain; the run may still be going on.")]) -> None:
    """Write the report of a training run into its folder: curves, settings, data, versions."""
    write = write_pretraining_report if is_pretraining(folder) else write_run_report
    say(f"report: {write(folder)}")
