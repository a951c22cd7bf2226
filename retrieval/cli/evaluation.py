"""``quiver quickstart | evaluate | report``: like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eval.evaluation import evaluate as run_evaluation
from eval.quickstart import QuickstartResult
from eval.quickstart import quickstart as run_quickstart
from eval.report.markdown import LABELS, write_report
from eval.results import Results
from retrieval.cli.output import (
    Int8Option,
    JsonOption,
    OverwriteOption,
    ProgressOption,
    command_line,
    print_json,
    print_table,
    say,
    show_progress,
)
from retrieval.models import load_model

# On a terminal of 80 columns there is no room for "Recall".
SHORT_LABELS = {key: label.replace("Recall", "R") for key, label in LABELS.items()}

# Lines of a found function that quickstart shows.
CODE_LINES = 8


def quickstart(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for data, models, index and report.")] = Path("quickstart"),
    packages: Annotated[list[str] | None, typer.Option("--packages", help="Mine an installed package too; may be repeated.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of the recipe to change, as section.setting=value.")] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Train a small code search model from nothing and score it; no network, no files, a few minutes.

    Example: quiver quickstart --packages numpy --packages rich --out quickstart
    """
    result = run_quickstart(
        out,
        packages=packages or [],
        overrides=overrides or [],
        overwrite=overwrite,
        progress=show_progress(progress),
        command=command_line(),
        say=(lambda message: None) if as_json else say,
    )
    if as_json:
        print_json(_quickstart_json(result))
    else:
        _print_quickstart(result)


def _measures(results: Results) -> dict[str, float]:
    return dict(results.collections[0].measures)


def _quickstart_json(result: QuickstartResult) -> dict[str, object]:
    bm25 = result.trained.collections[0].baselines[0]
    answers = {question: [{"id": answer.id, "score": answer.score} for answer in found] for question, found in result.answers.items()}
    return {
        "train_pairs": result.train_pairs,
        "held_out": result.held_out,
        "untrained": _measures(result.untrained),
        "trained": _measures(result.trained),
        "bm25": dict(bm25.measures),
        "answers": answers,
        "seconds": result.seconds,
        "report": str(result.report),
    }


def _print_quickstart(result: QuickstartResult) -> None:
    bm25 = result.trained.collections[0].baselines[0]
    systems = (("untrained", _measures(result.untrained)), ("trained", _measures(result.trained)), ("BM25", bm25.measures))
    rows = [(name, *(f"{measures[key]:.4f}" for key in SHORT_LABELS)) for name, measures in systems]
    print_table(f"{result.held_out:,} functions of modules that training never saw", ("", *SHORT_LABELS.values()), rows)
    for question, answers in result.answers.items():
        say(f"\n? {question}")
        for answer in answers:
            lines = answer.code.splitlines()
            say(f"  {answer.score:.3f}  {answer.id}")
            for line in lines[:CODE_LINES] if answer is answers[0] else []:
                say(f"         {line}")
    times = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in result.seconds.items())
    say(f"\n{times}; {sum(result.seconds.values()):.0f} s in all\nreport: {result.report}")


def evaluate(
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub id of a model, or bm25.")],
    data: Annotated[list[str], typer.Option("--data", "-d", help="A BEIR folder; may be repeated.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for results.json, runs and scores by query.")],
    split: Annotated[str, typer.Option(help="Which judgements: qrels/SPLIT.tsv.")] = "test",
    int8: Annotated[bool, Int8Option] = False,
    k: Annotated[int, typer.Option("-k", min=1, help="Documents kept a query.")] = 1000,
    bm25: Annotated[bool, typer.Option("--bm25/--no-bm25", help="Score BM25 beside the model.")] = True,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Score a model on collections by exact search.

    Example: quiver evaluate --model MODEL --data data/scifact --split test --out results/scifact
    """
    results = run_evaluation(
        load_model(model, precision="int8") if int8 and model != "bm25" else model,
        data,
        split=split,
        out=out,
        k=k,
        baselines=("bm25",) if bm25 else (),
        progress=show_progress(progress),
        command=command_line(),
        overwrite=overwrite,
    )
    write_report([out], out / "report.md")
    if as_json:
        say((out / "results.json").read_text(encoding="utf-8").rstrip())
        return
    for collection in results.collections:
        systems = [*((name.name, name.measures) for name in collection.baselines), (results.system.source, collection.measures)]
        rows = [(name, *(f"{measures[key]:.4f}" for key in SHORT_LABELS)) for name, measures in systems]
        title = f"{collection.key}: {collection.queries:,} queries, {collection.documents:,} documents"
        print_table(title, ("", *SHORT_LABELS.values()), rows)
        cut = collection.truncated
        say(f"cut to the model's length: {cut.documents:,} documents, {cut.queries:,} queries")
    say(f"results: {out / 'results.json'}\nreport: {out / 'report.md'}")


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders that quiver evaluate wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The Markdown file to write.")],
) -> None:
    """Put results of several systems into one report.

    Example: quiver report results/a results/b --out report.md
    """
    write_report(folders, out)
    say(f"report: {out}")
