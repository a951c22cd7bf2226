"""``quiver report``: results to tables, pages and metadata; like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from encoder import InputError
from encoder.files import check_target, write_text
from eval.report.compare import compare_results
from eval.report.compare_markdown import render_comparison
from eval.report.writing import write_card, write_mteb, write_paper, write_report
from retrieval.cli.output import JsonOption, help_alone, print_json, say


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
    out: Annotated[Path, typer.Option("--out", "-o", help="The file; .md, .html or .tex says what it is (paper: .md or .tex).")],
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
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The Markdown file to write; otherwise it is printed.")] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Say which differences are more than chance: paired tests over the queries, corrected for their number."""
    if out is not None:
        check_target(out)
    comparison = compare_results(baseline, *systems)
    if out is not None:
        write_text(out, render_comparison(comparison))
    if as_json:
        print_json(dataclasses.asdict(comparison))
    else:
        say(render_comparison(comparison).rstrip() if out is None else f"comparison: {out}")


@app.command("card", epilog="Example: quiver report card results/a --out README-metadata.yaml")
def card(
    folder: Annotated[Path, FolderArgument],
    out: Annotated[Path, typer.Option("--out", "-o", help="The YAML file to write.")],
    kind: Annotated[
        Card, typer.Option(help="model-index: front matter of a README; eval-results: a file for .eval_results/.")
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
        say(f"left out, for mteb has no task for them: {', '.join(without)}")
