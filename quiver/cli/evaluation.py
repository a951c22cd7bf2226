"""``quiver quickstart | evaluate``: like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import (
    CacheOption,
    Int8Option,
    JsonOption,
    NoCacheOption,
    OverwriteOption,
    ProgressOption,
    command_line,
    print_json,
    print_table,
    say,
    show_progress,
    vector_cache,
)
from quiver.cli.workers import AddressOption, ExecutorOption, WorkersOption
from quiver.eval.evaluation import evaluate as run_evaluation
from quiver.eval.quickstart import QuickstartResult
from quiver.eval.quickstart import quickstart as run_quickstart
from quiver.eval.report.retrieval import write_report
from quiver.eval.report.systems import LABELS
from quiver.eval.results import CollectionResult, Results
from quiver.eval.results_folder import REPORTS
from quiver.retrieval.cluster import open_executor

# On a terminal of 80 columns there is no room for "Recall".
SHORT_LABELS = {key: label.replace("Recall", "R") for key, label in LABELS.items()}

# Lines of a found function that quickstart shows.
CODE_LINES = 8


class Library(str, Enum):
    """What runs a model that is evaluated."""

    QUIVER = "quiver"
    SENTENCE_TRANSFORMERS = "sentence-transformers"
    PYLATE = "pylate"


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
    data: Annotated[
        list[str], typer.Option("--data", "-d", help="A BEIR folder, or a name such as beir/scifact or beir; may be repeated.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for results.json, reports, runs and scores by query.")],
    split: Annotated[str | None, typer.Option(help="Which judgements; by default those of published figures, else test.")] = None,
    index: Annotated[str, typer.Option(help="exact, or a FAISS factory string with its settings: HNSW32,Flat?efSearch=128.")] = "exact",
    int8: Annotated[bool, Int8Option] = False,
    library: Annotated[Library, typer.Option(help="What runs the model.")] = Library.QUIVER,
    k: Annotated[int, typer.Option("-k", min=1, help="Documents kept a query.")] = 1000,
    bm25: Annotated[bool, typer.Option("--bm25/--no-bm25", help="Score BM25 beside the model.")] = True,
    in_domain: Annotated[list[str] | None, typer.Option(help="A collection the model was trained on; may be repeated.")] = None,
    cache: Annotated[Path | None, CacheOption] = None,
    no_cache: Annotated[bool, NoCacheOption] = False,
    executor: Annotated[str, ExecutorOption] = "local",
    workers: Annotated[int | None, WorkersOption] = None,
    address: Annotated[str | None, AddressOption] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing; say what is missing.")] = False,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Score a model on collections; stopped half-way, the same command goes on where it was.

    Example: quiver evaluate --model MODEL --data beir/scifact --data my/folder --out results/model
    """
    results = run_evaluation(
        model,
        data,
        split=split,
        out=out,
        k=k,
        index=index,
        baselines=("bm25",) if bm25 else (),
        in_domain=in_domain or (),
        library=library.value,
        precision="int8" if int8 else "float",
        cache=vector_cache(cache, no_cache),
        executor=open_executor(executor, workers=workers, address=address),
        offline=offline,
        progress=show_progress(progress),
        command=command_line(),
        overwrite=overwrite,
    )
    reports = [out / name for name in REPORTS]
    for file in reports:
        write_report([results], file)
    if as_json:
        say((out / "results.json").read_text(encoding="utf-8").rstrip())
        return
    for collection in results.collections:
        _print_collection(results, collection)
    say(f"results: {out / 'results.json'}\nreport: {', '.join(map(str, reports))}")


def _print_collection(results: Results, collection: CollectionResult) -> None:
    systems = [*((each.name, each.measures) for each in collection.baselines), (results.system.source, collection.measures)]
    labels = {key: label for key, label in SHORT_LABELS.items() if key in collection.measures}
    rows = [(name, *(f"{measures[key]:.4f}" for key in labels)) for name, measures in systems]
    print_table(f"{collection.key}: {collection.queries:,} queries, {collection.documents:,} documents", ("", *labels.values()), rows)
    cut, interval = collection.truncated, collection.interval
    say(f"nDCG@10 {interval.low:.4f} to {interval.high:.4f} at {interval.level:.0%}; {collection.judged:.0%} of the first ten judged")
    say(f"cut to the model's length: {cut.documents:,} documents, {cut.queries:,} queries")
    if (
        collection.index.recall is not None
        and results.system.kind != "bm25"
        and any(share < 1 for share in collection.index.recall.values())
    ):
        shares = ", ".join(f"{name} {share:.4f}" for name, share in collection.index.recall.items())
        say(f"index {collection.index.kind} against exact search: {shares}")
