"""``quiver index build | add | delete | compact | calibrate | check | repair | info | export``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.index_export import export
from quiver.cli.output import (
    GenerationOption,
    Int8Option,
    JsonOption,
    OverwriteOption,
    ProgressOption,
    VerifyOption,
    help_alone,
    print_json,
    print_table,
    say,
    show_progress,
)
from quiver.cli.settings import EngineOption, parse_memory
from quiver.cli.workers import AddressOption, ExecutorOption, ThreadsOption, WorkersOption
from quiver.encoder import InputError
from quiver.encoder.files import read_lines
from quiver.retrieval.cluster import open_executor
from quiver.retrieval.data.corpus import read_queries
from quiver.retrieval.index import (
    BuildOptions,
    Index,
    add_documents,
    build_index,
    calibrate_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
    repair_index,
)
from quiver.retrieval.index.calibration import HITS, LEAST_HITS, QUERIES
from quiver.retrieval.index.engine_table import parse_engine
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.recall_table import Rung
from quiver.retrieval.index.repair import RepairReport
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.units import parse_duration

app = typer.Typer(invoke_without_command=True, callback=help_alone, help="Build, change and look at indexes.")


app.command("export", epilog="Example: quiver index export indexes/scifact --to qdrant://http://localhost:6333")(export)

FolderArgument = typer.Argument(help="An index.")
MemoryOption = typer.Option("--memory", help="What it may hold beside the model, such as 2GB.")
WaitOption = typer.Option("--wait", help="Time to wait for another process that writes to the index to finish, such as 30s or 5m.")


@app.command("build", epilog="Example: quiver index build data/scifact --model MODEL --out indexes/scifact")
def build(
    corpus: Annotated[Path, typer.Argument(help="A folder with corpus.jsonl[.gz], or such a file.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub id of a bi-encoder or a ColBERT.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    engine: Annotated[str, EngineOption] = "auto",
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    memory: Annotated[str, MemoryOption] = "2GB",
    int8: Annotated[bool, Int8Option] = False,
    title: Annotated[bool, typer.Option("--title/--no-title", help="Put titles before the texts.")] = True,
    text: Annotated[bool, typer.Option("--text/--no-text", help="Keep the texts, so that search can show them.")] = True,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", help="Metadata field to filter by, such as year or author.name; may be repeated. Default: all."),
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate/--no-calibrate", help="Measure recall and latency in the end.")] = True,
    executor: Annotated[str, ExecutorOption] = "local",
    workers: Annotated[int | None, WorkersOption] = None,
    address: Annotated[str | None, AddressOption] = None,
    threads: Annotated[int | None, ThreadsOption] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    wait: Annotated[str, WaitOption] = "0s",
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Encode a corpus and index it; a build that was killed goes on when it is started again.

    With several workers it has the same bytes: on this machine (--workers 4) or on a cluster (--executor ray --address HOST:6379), whose
    nodes need Quiver, the model and the folder of the index under the same paths.
    """
    chosen = parse_engine(engine)
    options = BuildOptions(chosen.name, chosen.settings, seed, parse_memory(memory), title, text, field, calibrate, threads)
    waiting, encoding = parse_duration(wait), open_executor(executor, workers=workers, address=address)
    loaded = load_model(model, precision="int8" if int8 else "float")
    shown = show_progress(progress)
    index = build_index(corpus, loaded, out, options=options, executor=encoding, overwrite=overwrite, wait=waiting, progress=shown)
    _describe(index, as_json)


@app.command("add", epilog="Example: quiver index add indexes/scifact more.jsonl")
def add(
    folder: Annotated[Path, FolderArgument],
    corpus: Annotated[Path, typer.Argument(help="A folder with corpus.jsonl[.gz], or such a file.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model; by default the one that built the index.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Documents whose ids are in the index take the place of those.")] = False,
    memory: Annotated[str, MemoryOption] = "2GB",
    wait: Annotated[str, WaitOption] = "0s",
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Add documents to an index; an addition that was killed goes on when it is started again."""
    loaded = model_of(open_index(folder), model)
    index = add_documents(
        folder,
        corpus,
        loaded,
        replace_existing=replace,
        memory=parse_memory(memory),
        wait=parse_duration(wait),
        progress=show_progress(progress),
    )
    _describe(index, as_json)


@app.command("delete", epilog="Example: quiver index delete indexes/scifact 4983 31715818")
def delete(
    folder: Annotated[Path, FolderArgument],
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of documents.")] = None,
    file: Annotated[Path | None, typer.Option("--ids", help="A file with an id a line.")] = None,
    wait: Annotated[str, WaitOption] = "0s",
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Delete documents; what they take is given back by compact."""
    wanted = [*(ids or []), *([] if file is None else read_ids(file))]
    if not wanted:
        raise InputError("name the documents to delete, or give --ids FILE")
    _describe(delete_documents(folder, wanted, wait=parse_duration(wait)), as_json)


@app.command("compact", epilog="Example: quiver index compact indexes/scifact")
def compact(
    folder: Annotated[Path, FolderArgument],
    memory: Annotated[str, MemoryOption] = "2GB",
    wait: Annotated[str, WaitOption] = "0s",
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Merge segments and drop deleted documents; nothing is encoded again."""
    _describe(compact_index(folder, memory=parse_memory(memory), wait=parse_duration(wait)), as_json)


@app.command("calibrate", epilog="Example: quiver index calibrate indexes/scifact --queries queries.jsonl -k 10")
def calibrate(
    folder: Annotated[Path, FolderArgument],
    queries: Annotated[
        Path | None, typer.Option("--queries", help="Real queries from a .jsonl[.gz] or .tsv file; by default made of the documents.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Encodes them; by default the one that built the index.")] = None,
    ks: Annotated[list[int] | None, typer.Option("-k", min=1, help="Hits a query; may be repeated. By default 10 and 100.")] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Queries that are searched, at most.")] = QUERIES,
    seed: Annotated[int, typer.Option(help="Of what is chosen at random.")] = 0,
    wait: Annotated[str, WaitOption] = "0s",
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Measure recall and latency at efforts from cheap to thorough, of which a search then takes one.

    --effort balanced, the default, takes the fastest with a recall of 0.95, --effort fast that with 0.90, --effort exact looks at
    everything; --target-recall takes the fastest that is known to reach another recall.
    """
    wanted, texts, loaded = ks or HITS, None, None
    if queries is not None:
        texts = [query.text for query in read_queries(queries)]
        loaded = model_of(open_index(folder), model)
    elif model is not None:
        raise InputError("--model encodes the queries of --queries FILE; add it, or leave --model out")
    elif min(wanted) < LEAST_HITS:
        raise InputError(f"without --queries some hits are what a query was made of, and do not count: -k {LEAST_HITS} at least")
    waiting, shown = parse_duration(wait), show_progress(progress)
    index = calibrate_index(folder, loaded, queries=texts, count=count, ks=wanted, seed=seed, wait=waiting, progress=shown)
    if as_json:
        print_json(index.manifest.calibration)
    else:
        _print_calibration(index)


@app.command("check", epilog="Example: quiver index check indexes/scifact")
def check(folder: Annotated[Path, FolderArgument], as_json: Annotated[bool, JsonOption] = False) -> None:
    """Read every file and compare its checksum; exit status 1 if the index is damaged."""
    report = check_index(folder)
    if as_json:
        generations = [{"generation": each.generation, "problems": each.problems} for each in report.generations]
        whole = {"folder": str(folder), "whole": not report.problems, "head": report.head_problems}
        print_json({**whole, "generations": generations, "leftovers": _names(report.leftovers)})
    else:
        for each in report.generations:
            say(f"generation {each.generation}: {'whole' if not each.problems else 'damaged'}")
            for problem in each.problems:
                say(f"  {problem}")
        for problem in report.head_problems:
            say(problem)
        for path in report.leftovers:
            say(f"left by an interrupted build or commit: {path}")
        if not report.generations and not report.head_problems:
            say("nothing has been committed yet")
    if report.problems:
        raise typer.Exit(1)


@app.command("repair", epilog="Example: quiver index repair indexes/scifact --dry-run")
def repair(
    folder: Annotated[Path, FolderArgument],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be kept and lost.")] = False,
    wait: Annotated[str, WaitOption] = "0s",
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Keep all that is whole of a damaged index, and name what is lost.

    What is damaged is moved to the folder quarantine/ in the index; nothing is deleted.
    """
    report = repair_index(folder, dry_run=dry_run, wait=parse_duration(wait))
    if as_json:
        print_json({**dataclasses.asdict(report), "quarantined": _names(report.quarantined)})
        return
    for line in _repaired(folder, report):
        say(line)


def _repaired(folder: Path, report: RepairReport) -> Iterator[str]:
    """What a repair did or would do, a line each."""
    if not report.problems:
        yield f"{folder}: whole, nothing to repair ({report.documents:,} documents)"
        return
    yield from report.problems
    yield from (f"corrected: {each}" for each in report.corrected)
    for what, ids in (
        ("lost", report.lost),
        ("taken from an older generation", report.recovered),
        ("kept without text", report.without_text),
        ("kept without fields to filter by", report.without_fields),
    ):
        if ids:
            yield f"{len(ids):,} documents {what}: {' '.join(ids)}"
    if report.lost_unnamed:
        yield f"{report.lost_unnamed:,} documents lost whose ids are lost too"
    if report.undone_deletions:
        yield f"{report.undone_deletions:,} deleted documents are found again, because the record of their deletion is lost"
    before = "an unknown number of" if report.documents_before is None else f"{report.documents_before:,}"
    if report.dry_run:
        yield f"{folder}: a repair would keep {report.documents:,} of {before} documents (generation {report.restored})"
        return
    yield f"{folder}: generation {report.generation} keeps {report.documents:,} of {before} documents of generation {report.restored}"
    if report.quarantined:
        yield f"{len(report.quarantined)} files and folders are in {report.quarantined[0].parent}; delete it when you no longer need them"


@app.command("info", epilog="Example: quiver index info indexes/scifact --json")
def info(
    folder: Annotated[Path, FolderArgument],
    generation: Annotated[int | None, GenerationOption] = None,
    verify: Annotated[bool, VerifyOption] = True,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Say what an index holds and who built it."""
    _describe(open_index(folder, generation=generation, verify=verify), as_json)


def read_ids(path: Path) -> list[str]:
    """The ids of a file, one a line.

    Raises:
        InputError: It cannot be read, or is empty.
    """
    return [line.strip() for _, line in read_lines(path)]


def model_of(index: Index, name: str | None) -> BiEncoder | ColBERT:
    """The model to encode for an index: the one named, or the one that built it.

    Raises:
        InputError: It cannot be loaded.
    """
    card = index.manifest.model
    if name is not None:
        return load_model(name, precision=card.precision)
    try:
        return load_model(card.source, precision=card.precision)
    except InputError as error:
        raise InputError(f"{error}; the index was built with that model: give --model if it has moved") from error


def _names(paths: tuple[Path, ...]) -> list[str]:
    return [str(path) for path in paths]


def _describe(index: Index, as_json: bool) -> None:
    manifest = index.manifest
    if as_json:
        content = {**dataclasses.asdict(manifest), "kind": manifest.kind, "tokens": dataclasses.asdict(manifest.tokens)}
        content["presets"] = index.presets()
        content["preset_recall"] = {
            str(k): {name: dataclasses.asdict(rung) for name, rung in presets.items()} for k, presets in index.preset_recall().items()
        }
        sizes = {"documents": len(index), "deleted": manifest.deleted, "vectors": manifest.vectors, "bytes": manifest.bytes}
        print_json(
            {
                "folder": str(index.path),
                "verified": index.verified,
                **sizes,
                "fields": {name: [*types] for name, types in index.fields.items()},
                **content,
            }
        )
        return
    tokens = manifest.tokens
    rows = [
        ("kind", manifest.kind),
        *((name, str(value)) for name, value in index.parameters.items()),
        ("documents", f"{len(index):,}"),
        ("deleted documents", f"{manifest.deleted:,}"),
        ("segments", f"{len(manifest.segments):,}"),
        ("vectors", f"{manifest.vectors:,}"),
        ("tokens", f"{tokens.tokens:,}"),
        ("truncated documents", f"{tokens.truncated:,}"),
        ("empty documents", f"{tokens.empty:,}"),
        ("fields", ", ".join(index.fields) or "none"),
        ("size", f"{manifest.bytes / 1e6:,.1f} MB"),
        ("model", manifest.model.source),
        ("precision of the model", manifest.model.precision),
        ("fingerprint", manifest.model.fingerprint[:16]),
        ("generation", f"{manifest.generation} ({manifest.operation})"),
        ("created", manifest.created),
        ("verification", "blocks, when they are first read" if index.verified else "off: this index was opened unverified"),
    ]
    print_table(str(index.path), ("", "value"), rows)
    _print_presets(index)


def _print_presets(index: Index) -> None:
    """The presets with their knobs, and what was measured of them."""
    ks = [10] if index.calibration is None else [table.k for table in index.calibration.tables]
    k = 10 if 10 in ks else ks[0]
    measured = _measured(index, k)
    rows = []
    for name, knobs in index.presets(k).items():
        rung = measured.get(_knobs(knobs))
        unknown = ("not measured" if knobs else "exact", "-")
        rows.append((name, _knobs(knobs), *(unknown if rung is None else (_recall(rung), f"{rung.p50_ms:.2f}"))))
    title = f"search for {k} hits"
    if index.calibration is not None:
        queries = next(table.queries for table in index.calibration.tables if table.k == k)
        title += f", measured with {queries} queries on {index.calibration.documents:,} documents"
    print_table(title, ("preset", "knobs", "recall", "p50 (ms)"), rows)
    if index.calibration is not None and (advice := index.calibration.advice()):
        say(f"{index.path}: {advice}")


def _print_calibration(index: Index) -> None:
    """All that was measured."""
    rows = []
    for table in () if index.calibration is None else index.calibration.tables:
        presets = {name: _knobs(knobs) for name, knobs in index.presets(table.k).items()}
        for text, rung in _measured(index, table.k).items():
            names = ", ".join(name for name, knobs in presets.items() if knobs == text)
            rows.append((str(table.k), names, text, _recall(rung), f"{rung.p50_ms:.2f}", f"{rung.p95_ms:.2f}"))
    print_table(str(index.path), ("hits", "preset", "knobs", "recall", "p50 (ms)", "p95 (ms)"), rows)


def _measured(index: Index, k: int) -> dict[str, Rung]:
    """Knobs -> what was measured of them for so many hits."""
    tables = () if index.calibration is None else index.calibration.tables
    return {_knobs(rung.knobs): rung for table in tables if table.k == k for rung in table.rungs}


def _knobs(knobs: Mapping[str, Setting]) -> str:
    if not knobs or knobs.get("exhaustive"):
        return "everything"
    return ", ".join(f"{name}={value:g}" for name, value in knobs.items() if isinstance(value, int | float) and value)


def _recall(rung: Rung) -> str:
    return f"{rung.recall:.3f} ({rung.low:.3f}-{rung.high:.3f})"
