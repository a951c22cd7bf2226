"""Evaluation: quickstart, evaluate, report write | compare | card | mteb | training, and collections."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from quiver.cli import options
from quiver.cli.options import (
    argument,
    command,
    command_line,
    group_with_default,
    help_alone,
    option,
    print_json,
    print_table,
    print_values,
    say,
    say_error,
)
from quiver.encoder.errors import InputError
from quiver.encoder.progress import progress_bar
from quiver.retrieval.models.options import ModelOptions

if TYPE_CHECKING:
    from quiver.eval.datasets.cache import Cache
    from quiver.eval.datasets.catalogue import Entry
    from quiver.eval.report.compare import Comparison
    from quiver.eval.results import Results

_CODE_LINES = 8  # lines of a found function that quickstart prints


report_app = typer.Typer(
    cls=group_with_default("write"),
    invoke_without_command=True,
    callback=help_alone,
    help="Turn results into reports. If the first argument is a folder, the command is write. Type ./compare for a folder called compare.",
    epilog="Example: quiver report results/a results/b --out report.html",
)
collections_app = typer.Typer(invoke_without_command=True, callback=help_alone, help="List, download and make collections.")


@command
def quickstart(
    overrides: tuple[str, ...] = options.OVERRIDES,
    *,
    out: Path = option(Path("quickstart"), "Folder to write: data, models, index and report.", "-o"),
    packages: tuple[str, ...] = options.PACKAGES,
    overwrite: bool = options.OVERWRITE,
    output: options.Output,
) -> None:
    """Train a small code search model on Python's standard library, evaluate it beside BM25, and write a report. Needs no download.

    Example: quiver quickstart --package numpy --package rich --out quickstart
    """
    from quiver.eval.quickstart import NEEDS, QUESTIONS
    from quiver.eval.quickstart import quickstart as run_quickstart

    introduction = [
        f"Trains a small code search model on Python's standard library, compares it\nwith BM25, and writes a report to {out}.",
        f"Needs {NEEDS}.\n",
    ]

    def say_stage(message: str) -> None:
        """The first stage begins when the arguments have been checked."""
        while introduction:
            say(introduction.pop(0))
        say(message)

    result = run_quickstart(
        out,
        packages=packages,
        overrides=overrides,
        overwrite=overwrite,
        progress=output.progress,
        command=command_line(),
        say=(lambda message: None) if output.json else say_stage,
    )
    trained = result.trained.collections[0]
    scores = {"untrained": result.untrained.collections[0].measures, "trained": trained.measures, "bm25": trained.baselines[0].measures}
    if output.json:
        counts = {name: getattr(result, name) for name in ("train_pairs", "test_queries", "functions", "seconds")}
        given = {question: [dataclasses.asdict(answer) for answer in found] for question, found in result.answers.items()}
        print_json({**counts, **scores, "answers": given, "report": str(result.report), "next": list(result.next_commands.values())})
        return
    held_out = f"{result.test_queries:,} queries of packages held out from training; {result.functions:,} functions"
    _print_scores(f"{held_out}; scores in points (hundredths)", scores)
    for question in QUESTIONS:
        answers = result.answers[question.text]
        say(f"\n? {question.text}")
        for rank, answer in enumerate(answers):
            say(f"  {answer.score:.3f}  {answer.id}{'  (right)' * answer.right}")
            for line in answer.code.splitlines()[:_CODE_LINES] if rank == 0 else []:
                say(f"         {line}")
        if not any(answer.right for answer in answers):
            wrong = f"Wrong: {question.right[0]} is expected. {question.lesson}".strip()
            say(textwrap.fill(wrong, 76, initial_indent="  ", subsequent_indent="  "))
    times = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in result.seconds.items())
    say(f"\n{times}; {sum(result.seconds.values()):.0f} s in total\nreport: {result.report}\n\nNext:")
    for what, line in result.next_commands.items():
        say(f"  # {what}\n  {line}")


def _print_scores(title: str, systems: Mapping[str, Mapping[str, float | None]]) -> None:
    """Print measures in points, a row per system, with labels that fit a terminal of 80 columns."""
    from quiver.eval.report.compare import LABELS, points

    names = [name for name in LABELS if any(name in measures for measures in systems.values())]
    rows = [(system, *(points(measures.get(name)) for name in names)) for system, measures in systems.items()]
    print_table(title, ("", *(LABELS[name].replace("Recall", "R") for name in names)), rows)


@command
def evaluate(
    out: Path = option(..., "Results folder to write: results.json, reports, runs and scores per query.", "-o"),
    data: tuple[str, ...] = option((), "Collection: a BEIR folder, or a name such as beir/scifact or beir. Repeatable.", "-d"),
    queries: Path | None = options.QUERY_FILE,
    qrels: Path | None = option(
        None,
        "File of relevance judgements: BEIR's TSV, TREC's four columns, or a table such as .csv with the fields query_id, document_id and"
        " grade (without one, all are relevant). With --queries instead of --data for --index and --run.",
    ),
    rename: Mapping[str, str] = options.RENAME,
    duplicate_judgements: Literal["error", "max", "sum"] = option(
        "error",
        "Grade of a query and document that are judged several times, as in a click log: the highest (max), the sum of all, or an error if"
        " the grades differ. Equal judgements count once, except in a sum.",
    ),
    collection_name: tuple[str, ...] = option(
        (),
        "Name of the collection in reports. Default: that of the published collection, folder or file of queries. Repeatable: one per"
        " --data.",
    ),
    *,
    model: str | None = option(None, "Folder or hub id of the model, or bm25.", "-m"),
    revision: str | None = options.REVISION,
    index: Path | None = options.SEARCHED_INDEX,
    run: Path | None = option(None, "TREC run to score instead of --model; for several collections a folder of COLLECTION.SPLIT.trec."),
    combination: options.Combination,
    name: str = option("", "Name of the system in reports. Default: made from its parts."),
    title: str = options.REPORT_TITLE,
    add_to: Path | None = option(None, "Report (.md, .html or .tex) to add the system to, beside those that it has. Written if missing."),
    split: str | None = option(None, "Split of the relevance judgements. Default: the split of the published results, otherwise test."),
    engine: str = options.ENGINE.with_default("exact"),
    effort: str | None = options.EFFORT,
    encoding: options.Encoding,
    settings: ModelOptions,
    library: Literal["quiver", "sentence-transformers", "pylate"] = option("quiver", "Library that runs the model."),
    k: int = option(1000, "Number of results per query.", min=1),
    bm25: bool = option(True, "Evaluate BM25 as a baseline.", "--bm25/--no-bm25"),
    in_domain: tuple[str, ...] = option((), "Collection the model was trained on, reported separately. Repeatable."),
    cache: options.VectorCache,
    offline: bool = option(False, "Work offline; list missing files instead of downloading them."),
    overwrite: bool = options.OVERWRITE,
    output: options.Output,
) -> None:
    """Evaluate a model, an index, a run, a fusion or a re-ranking on collections. Repeat the command to resume an evaluation.

    Examples: quiver evaluate --model MODEL --data beir/scifact --data my/folder --out results/model

    quiver evaluate --model MODEL --fuse bm25 --name hybrid --data beir/scifact --out results/hybrid --add-to results/model/report.html

    quiver evaluate --run bm25.trec --data beir/scifact --out results/run

    quiver evaluate --index indexes/scifact --rerank COLBERT --data beir/scifact --out results/reranked

    quiver evaluate --index indexes/manual --queries questions.csv --qrels answers.csv --group-by file --out results/manual

    quiver evaluate --index indexes/shop --queries clicks.csv --qrels clicks.csv --rename search=query,sku=document --out results/shop
    """
    model = model if revision is None else options.at_revision(model or "none", revision)
    given = [str(each) for each in (model, index, run) if each is not None]
    from quiver.eval.evaluation import evaluate as run_evaluation
    from quiver.eval.report.charts import check_matplotlib
    from quiver.eval.report.retrieval import reported_folders, write_report
    from quiver.eval.results import REPORTS, read_results
    from quiver.retrieval.index.engines import parse_effort

    check_matplotlib()  # before hours of scoring
    fusion = combination.make_fusion(given)
    executor = encoding.open_executor()
    before = [] if add_to is None else reported_folders(add_to)
    for each in before:
        if each.resolve() != out.resolve():
            read_results(each)  # a folder that is gone is found before hours of scoring
    results = run_evaluation(
        model,
        data,
        queries=queries,
        qrels=qrels,
        rename=rename,
        duplicate_judgements=duplicate_judgements,
        collection_name=collection_name,
        index=index,
        run=run,
        fuse=combination.fuse,
        fusion=fusion,
        rerank=combination.rerank,
        candidates=combination.candidates,
        group_by=combination.group_by,
        name=name,
        split=split,
        out=out,
        k=k,
        engine=engine,
        effort=parse_effort(effort or "balanced"),
        baselines=("bm25",) if bm25 else (),
        in_domain=in_domain,
        library=library,
        **encoding.model_arguments(),
        model_options=settings,
        cache=cache.folder(),
        executor=executor,
        offline=offline,
        progress=output.progress,
        command=command_line(),
        overwrite=overwrite,
    )
    reports = [out / name for name in REPORTS]
    with progress_bar("reports", 1, enabled=output.progress):
        write_report([out], *reports, title=title)
        if add_to is not None:
            write_report([*(each for each in before if each.resolve() != out.resolve()), out], add_to, title=title)
            reports.append(add_to)
    if output.json:
        say((out / "results.json").read_text(encoding="utf-8").rstrip())
    else:
        _print_results(results)
        say(f"results: {out / 'results.json'}\nreport: {', '.join(map(str, reports))}")
    if results.failed:
        number = len(results.failed) + len(results.collections)
        reasons = [f"  {each.key}: {each.reason}" for each in results.failed]
        again = "  to evaluate them, correct what is wrong and repeat the command; the others are not evaluated again"
        say_error("\n".join([f"{len(results.failed)} of {number} collections were not evaluated", *reasons, again]))
        raise typer.Exit(1)


def _print_results(results: Results) -> None:
    """Print the scores on each collection, and of several the means over data sets, which are blank where a member is missing."""
    from quiver.eval.metrics import data_sets
    from quiver.eval.report.compare import LABELS, collections_by_key, points, row_average, rows
    from quiver.eval.results import HEADLINE

    scored = rows([(results.system.label, results)])
    for each in results.collections:
        title = f"{each.key}: {each.queries:,} queries, {each.documents:,} documents{each.named_by}; in points"
        _print_scores(title, {row.label: row.scores[each.key].measures for row in scored if each.key in row.scores})
        interval = f"{points(each.interval.low)} to {points(each.interval.high)} at {each.interval.level:.0%} confidence"
        say(f"{LABELS[HEADLINE]} {interval}; {each.judged:.0%} of the top 10 documents are judged")
        if results.system.kind == "bm25":  # whose words are not truncated
            continue
        counts = {"documents": each.truncated.documents, "queries": each.truncated.queries}
        if known := [f"{count:,} {texts}" for texts, count in counts.items() if count is not None]:
            say(f"truncated: {', '.join(known)}")
        if any(share < 1 for share in (each.index.recall or {}).values()):
            shares = ", ".join(f"{name} {share:.2%}" for name, share in (each.index.recall or {}).items())
            say(f"recall of the index {each.index.kind} against exact search: {shares}")
    if len(results.collections) + len(results.failed) < 2:
        return
    sets = data_sets(results.parts(HEADLINE))
    title = f"average over {len(sets)} data sets" if len(sets) > 1 else f"{next(iter(sets))}: mean over its collections"
    blank = "; blank, because not all were evaluated" if results.failed else ""
    known_as = collections_by_key([results])
    means = {row.label: {name: row_average(row, known_as, failed=results.failed, measure=name).value for name in LABELS} for row in scored}
    _print_scores(f"{title}, in points{blank}", means)


@report_app.command("write")
@command
def report_write(
    folders: tuple[Path, ...] = options.RESULTS_FOLDERS,
    *,
    out: Path = option(..., "Report file to write; .md, .html or .tex.", "-o"),
    layout: Literal["results", "paper"] = option("results", "Table layout: Quiver's, or that of the ModernBERT paper with its rows."),
    against: str | None = option(None, "Row of the paper to show differences from, such as ModernBERT-base, with --layout paper."),
    title: str = options.REPORT_TITLE,
    progress: bool = options.PROGRESS,
) -> None:
    """Write a report on the results of one or more systems.

    Example: quiver report write results/a results/b --layout paper --against ModernBERT-base --out table7.tex
    """
    from quiver.eval.report.paper import write_paper
    from quiver.eval.report.retrieval import write_report

    if layout == "paper":
        write_paper(folders, out, against=against, title=title)
    elif against is not None:
        raise InputError("--against names a row of the paper and needs --layout paper")
    else:
        with progress_bar("comparing", 1, enabled=progress):
            write_report(folders, out, title=title)
    say(f"report: {out}")


@report_app.command("compare")
@command
def report_compare(
    baseline: str = argument("Results folder of the baseline, or bm25 for the BM25 baseline in each results folder."),
    systems: tuple[Path, ...] = argument("Results folders to compare with the baseline."),
    *,
    out: Path | None = option(
        None, "Report file (.md, .html or .tex) with all measures, p values and the queries that changed most.", "-o"
    ),
    title: str = options.REPORT_TITLE,
    output: options.Output,
) -> None:
    """Test which differences are significant, by paired tests over the queries with correction for multiple tests.

    Example: quiver report compare results/a results/b --out comparison.md
    """
    from quiver.eval.report.compare import check_comparison_target, compare_results, write_comparison

    if out is not None:
        check_comparison_target(out)
    with progress_bar("comparing", 1, enabled=output.progress):
        comparison = compare_results(baseline, *systems)
    if out is not None:
        write_comparison(comparison, out, title=title)
    if output.json:
        print_json(dataclasses.asdict(comparison))
        return
    _print_comparison(comparison)
    if out is not None:
        say(f"comparison: {out}")


def _print_comparison(comparison: Comparison) -> None:
    """Print nDCG@10 only, which fits a terminal; --out has all measures, p values and changed queries."""
    from quiver.eval.report.compare import LABELS, points
    from quiver.eval.results import HEADLINE

    pairings = [each for each in (*comparison.pairings, *comparison.averages) if HEADLINE in each.measures]
    for system in comparison.systems:
        rows = []
        for each in (each for each in pairings if each.system == system):
            paired, verdict = each.measures[HEADLINE].paired, each.measures[HEADLINE].verdict.replace("not significant", "unclear")
            change, interval = f"{100 * paired.difference:+.2f}", f"{100 * paired.interval.low:+.1f} to {100 * paired.interval.high:+.1f}"
            rows.append((each.data_set, points(paired.first), points(paired.second), change, interval, verdict))
        title = f"{LABELS[HEADLINE]} of {system} in points (hundredths), compared with {comparison.baseline}"
        print_table(title, ("collection", "before", "now", "change", "95% interval", "verdict"), rows)
    unclear = [each.measures[HEADLINE].paired.interval for each in pairings if each.measures[HEADLINE].verdict == "not significant"]
    if any(interval.low * interval.high > 0 for interval in unclear):
        say("the verdict is corrected for all comparisons together (Holm), the interval is that of one alone")
    for unpaired in comparison.unpaired:
        say(f"not compared: {unpaired.collection}, because {unpaired.lacks} was not evaluated on it")


@report_app.command("card")
@command
def report_card(
    folder: Path = options.RESULTS_FOLDER,
    *,
    out: Path = option(..., "YAML file to write; a file with other content is not overwritten.", "-o"),
    layout: Literal["model-index", "eval-results"] = option(
        "model-index",
        "Layout to write: model-index, to copy into a model card, or eval-results, a file for the folder .eval_results/.",
    ),
) -> None:
    """Write results as model metadata for the Hugging Face Hub.

    Example: quiver report card results/a --out model-index.yaml
    """
    from quiver.eval.report.hub import write_card

    write_card(folder, out, kind=layout)
    say(f"metadata: {out}")


@report_app.command("mteb")
@command
def report_mteb(folder: Path = options.RESULTS_FOLDER, *, out: Path = option(..., "Folder to write: one file per task.", "-o")) -> None:
    """Write results in the file format of mteb.

    Example: quiver report mteb results/a --out mteb-results/model/revision
    """
    from quiver.eval.report.hub import write_mteb

    files, without = write_mteb(folder, out)
    say(f"{len(files)} tasks: {out}")
    if without:
        say(f"left out, because mteb has no such task or uses another measure: {', '.join(map(repr, without))}")


@report_app.command("training")
@command
def report_training(folder: Path = argument("Run folder of quiver train or quiver pretrain, finished or not.")) -> None:
    """Write the report of a training run into its folder: curves, settings, data, versions.

    Example: quiver report training runs/mine
    """
    from quiver.eval.report.training import write_training_report

    say(f"report: {write_training_report(folder)}")


@report_app.command("qa")
@command
def report_qa(
    folders: tuple[Path, ...] = argument("Folders of quiver qa train or quiver qa evaluate, all on the same questions."),
    *,
    out: Path = option(..., "Report file to write; .md, .html or .tex.", "-o"),
    title: str = options.REPORT_TITLE,
) -> None:
    """Compare models that answer with spans: exact match and F1 by length.

    Example: quiver report qa runs/qa-512 runs/qa-1024 --out lengths.md
    """
    from quiver.eval.report.answers import write_answers_report

    write_answers_report(folders, out, title=title)
    say(f"report: {out}")


@collections_app.command("list")
@command
def collections_list(names: tuple[str, ...] = options.COLLECTION_NAMES, json: bool = options.JSON) -> None:
    """List the collections that can be evaluated by name.

    Example: quiver collections list beir
    """
    cache, entries = _open_cache(names)
    known = [_describe_entry(entry, cache) for entry in entries]
    if json:
        print_json(known)
        return
    rows = []
    for each in known:
        counts = ("" if each[name] is None else f"{each[name]:,}" for name in ("queries", "documents"))
        megabytes = "" if each["bytes"] is None else f"{each['bytes'] / 1e6:,.1f}"
        rows.append((each["key"], each["split"], *counts, megabytes, "yes" * (each["folder"] is not None)))
    header = ("name", "split", "queries", "documents", "MB", "cached")
    print_table(f"{len(entries)} collections; cache: {cache.root}", header, rows)


@collections_app.command("show")
@command
def collections_show(name: str = argument("Collection, such as beir/scifact."), json: bool = options.JSON) -> None:
    """Show the size, licence, split and sources of a collection.

    Example: quiver collections show beir/webis-touche2020
    """
    cache, entries = _open_cache([name])
    known = [_describe_entry(entry, cache) for entry in entries]
    if json:
        print_json(known)
        return
    for each in known:
        hidden = ("key", "sources", "folder", "held", "bytes", "revision", "url")
        shown = {name: value for name, value in each.items() if name not in hidden}
        shown |= {"splits": ", ".join(each["splits"]), "download": _size(each["bytes"])}
        shown |= {f"from {key}": f"{one['url']} ({one['revision'] or 'no fixed revision'})" for key, one in each["sources"].items()}
        where = f"no; download with: quiver collections fetch {each['key']}"
        print_values(each["key"], shown | {"cached": f"{each['folder']}, {each['held']}" if each["folder"] else where})


@collections_app.command("fetch")
@command
def collections_fetch(
    names: tuple[str, ...] = argument("Collections, groups or families."),
    source: str | None = option(None, "Source to download from, as listed by quiver collections show. Default: the first.", "--from"),
    progress: bool = options.PROGRESS,
) -> None:
    """Download collections into the cache. Collections that are cached already are verified against their checksums.

    Example: quiver collections fetch beir/scifact nanobeir
    """
    from quiver.eval.datasets.benchmarks import held

    cache, entries = _open_cache(names)
    if source is not None and (without := [entry for entry in entries if source not in entry.sources]):
        raise InputError(f"{without[0].key} has no source {source!r}; its sources are {', '.join(without[0].sources)}")
    done: set[str] = set()
    for entry in entries:
        cached = held(entry, cache)
        chosen = entry.sources[source] if source is not None else entry.source if cached is None else cached[0]
        if chosen.unit in done:  # an archive that holds several collections
            continue
        done.add(chosen.unit)
        record = cache.fetch(chosen, progress=progress)
        say(f"{entry.key}: {cache.folder(chosen)}, {_size(record.bytes)}, {record.revision}")


@collections_app.command("missing")
@command
def collections_missing(names: tuple[str, ...] = options.COLLECTION_NAMES, json: bool = options.JSON) -> None:
    """List the collections that are not in the cache, and the command that downloads them.

    Example: quiver collections missing beir
    """
    from quiver.eval.datasets.benchmarks import missing, shortest

    cache, entries = _open_cache(names)
    absent = missing(entries, cache)
    if json:
        print_json([entry.key for entry in absent])
    elif not absent:
        say(f"nothing is missing: all {len(entries)} collections are in {cache.root}")
    else:
        archives = {entry.source.unit: entry.metadata.bytes for entry in absent}
        size = _size(sum(size or 0 for size in archives.values()))
        rest = ", and those of unknown size" * (None in archives.values())
        say(f"{len(absent)} of {len(entries)} collections are not in {cache.root}: {size} to download{rest}")
        say(f"quiver collections fetch {' '.join(shortest(absent))}")


@collections_app.command("squad")
@command
def collections_squad(
    file: Path = argument("Question answering data in SQuAD's JSON format, such as KorQuAD."),
    *,
    out: Path = options.BEIR_OUT,
    qrels: Path | None = option(None, "Folder of relevance judgements SPLIT.tsv to use. Default: one split, test, with all questions."),
) -> None:
    """Make a collection from question answering data: the relevant document of a question is its paragraph.

    Example: quiver collections squad KorQuAD_v1.0_dev.json --out data/korquad
    """
    from quiver.eval.datasets.squad import read_squad, write_squad

    found = read_squad(file)
    splits = write_squad(found, out, qrels=qrels)
    say(f"{out}: {len(found.documents):,} documents, {len(found.queries):,} queries; {', '.join(splits)}")


@collections_app.command("docstrings")
@command
def collections_docstrings(
    *, out: Path = options.BEIR_OUT, packages: tuple[str, ...] = options.PACKAGES, progress: bool = options.PROGRESS
) -> None:
    """Make a code search collection of Python's standard library, without a download: docstrings are queries, functions are documents.

    The folder also holds train.jsonl.gz, pairs to train on. Three splits: train, dev and test, of different packages.

    Example: quiver collections docstrings --out data/code
    """
    from quiver.retrieval.data.docstrings import TRAINING_PAIRS, mine, split_pairs, write_collection

    splits = split_pairs(mine(packages=packages, progress=progress))
    write_collection(splits, out)
    counts = ", ".join(f"{len(pairs):,} {name}" for name, pairs in splits._asdict().items())
    say(f"{out}: {sum(map(len, splits)):,} functions; queries: {counts}\ntraining pairs: {out / TRAINING_PAIRS}")


def _open_cache(names: Sequence[str]) -> tuple[Cache, list[Entry]]:
    """The cache of collections, and the registered ones that are named; without names all."""
    from quiver.eval.datasets.benchmarks import registry, require
    from quiver.eval.datasets.cache import Cache

    entries = registry() if not names else {entry.key: entry for name in names for entry in require(name)}
    return Cache.usual(), list(entries.values())


def _describe_entry(entry: Entry, cache: Cache) -> dict[str, Any]:
    from quiver.eval.datasets.benchmarks import held

    present = held(entry, cache)
    return {
        **{name: getattr(entry, name) for name in ("key", "name", "split", "splits", "exclude_self", "use_title")},
        **dataclasses.asdict(entry.metadata),
        "sources": {key: {"url": source.url, "revision": source.revision} for key, source in entry.sources.items()},
        "folder": None if present is None else str(cache.folder(present[0])),
        "held": None if present is None else present[1].revision,
        "note": entry.note,
    }


def _size(number: int | None) -> str:
    return "unknown" if number is None else f"{number / 1e6:,.1f} MB"
