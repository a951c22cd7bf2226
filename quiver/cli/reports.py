"""``quiver report``: reports of results, comparisons, metadata for the Hugging Face Hub, and reports of training runs."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quiver.cli.output import JsonOption, help_alone, print_json, print_table, say
from quiver.encoder import InputError
from quiver.eval.report.compare import Comparison, check_comparison_target, compare_results, write_comparison
from quiver.eval.report.hub import write_card, write_mteb
from quiver.eval.report.paper import write_paper
from quiver.eval.report.retrieval import write_report
from quiver.eval.report.systems import LABELS
from quiver.eval.report.training import write_training_report
from quiver.eval.results import HEADLINE


class _FoldersFirst(TyperGroup):
    """A command group where ``quiver report FOLDER...`` means ``quiver report write FOLDER...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["write", *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=_FoldersFirst,
    invoke_without_command=True,
    callback=help_alone,
    help="Write reports of results. A folder as the first argument means write; give a folder called compare as ./compare.",
    epilog="Example: quiver report results/a results/b --out report.html",
)

FoldersArgument = typer.Argument(help="Result folders, written by quiver evaluate.")
FolderArgument = typer.Argument(help="Result folder, written by quiver evaluate.")


class Layout(str, Enum):
    """Layout of a report."""

    RESULTS = "results"
    PAPER = "paper"


class Card(str, Enum):
    """Kind of metadata for the Hugging Face Hub."""

    MODEL_INDEX = "model-index"
    EVAL_RESULTS = "eval-results"


@app.command("write", epilog="Example: quiver report write results/a results/b --layout paper --against ModernBERT-base --out table7.tex")
def write(
    folders: Annotated[list[Path], FoldersArgument],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file; the suffix .md, .html or .tex selects the format.")],
    layout: Annotated[
        Layout, typer.Option(help="Quiver's tables, or those of the ModernBERT paper with its published rows.")
    ] = Layout.RESULTS,
    against: Annotated[
        str | None, typer.Option(help="With --layout paper: published row to subtract from the measured ones, such as ModernBERT-base.")
    ] = None,
) -> None:
    """Write one report of the results of one or more systems."""
    if layout is Layout.PAPER:
        write_paper(folders, out, against=against)
    elif against is not None:
        raise InputError("--against names a row of the paper and needs --layout paper")
    else:
        write_report(folders, out)
    say(f"report: {out}")


@app.command("compare", epilog="Example: quiver report compare results/a results/b --out comparison.md")
def compare(
    baseline: Annotated[str, typer.Argument(help="Result folder to compare with, or bm25 for the baseline in each result folder.")],
    systems: Annotated[list[Path], typer.Argument(help="Result folders of the systems to compare.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output file (.md, .html or .tex) with all measures, p-values and the queries that changed most."),
    ] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Test which differences between systems are significant: paired tests over queries, corrected for multiple comparisons."""
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
    """Print nDCG@10 alone, which fits a terminal; the file holds everything else."""
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
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file, .yaml or .yml; a file with other content is not overwritten.")],
    kind: Annotated[
        Card, typer.Option(help="model-index: metadata for a model card; eval-results: a file for .eval_results/.")
    ] = Card.MODEL_INDEX,
) -> None:
    """Write results as metadata of a model on the Hugging Face Hub."""
    write_card(folder, out, kind=kind.value)
    say(f"metadata: {out}")


@app.command("mteb", epilog="Example: quiver report mteb results/a --out mteb-results/model/revision")
def mteb(
    folder: Annotated[Path, FolderArgument],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder; one file per task.")],
) -> None:
    """Write results as result files of mteb."""
    files, without = write_mteb(folder, out)
    say(f"{len(files)} tasks: {out}")
    if without:
        say(f"left out (mteb has no such task or scores it in another way): {', '.join(map(repr, without))}")


@app.command("training", epilog="Example: quiver report training runs/mine")
def training(
    folder: Annotated[Path, typer.Argument(help="Output folder of quiver train or quiver pretrain; the run may be unfinished.")],
) -> None:
    """Write a report of a training run into its folder: curves, settings, data and versions."""
    say(f"report: {write_training_report(folder)}")
