"""``quiver index``: build, add, refresh, delete, compact, calibrate, check, repair, info, export."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from quiver.cli import options
from quiver.cli.options import GROUPS, argument, command, help_alone, option, print_json, print_result, print_table, read_ids, say
from quiver.encoder.errors import InputError
from quiver.encoder.progress import progress_bar
from quiver.retrieval.models.options import ModelOptions
from quiver.retrieval.options import SourceOptions

if TYPE_CHECKING:
    from quiver.retrieval.index import IndexReader
    from quiver.retrieval.index.engines import Setting
    from quiver.retrieval.index.recall_table import GridPoint
    from quiver.retrieval.index.repair import RepairReport
    from quiver.retrieval.index.sources import IndexSource

app = typer.Typer(invoke_without_command=True, callback=help_alone, help="Build, change and inspect indexes.")


@app.command("build")
@command
def build(
    source: str = options.SOURCE,
    *,
    model: str = option(..., "Folder or hub id of a bi-encoder or a ColBERT model; or bm25, which needs none.", "-m"),
    revision: str | None = options.REVISION,
    out: Path = option(..., "Index folder to write.", "-o"),
    engine: str = options.ENGINE,
    seed: int = options.SEED,
    memory: int = options.MEMORY,
    encoding: options.Encoding,
    settings: ModelOptions,
    given: SourceOptions,
    use_title: bool = options.USE_TITLE,
    store_text: bool = options.STORE_TEXT,
    field: tuple[str, ...] = option((), "Metadata field to filter by, such as year or author.name. Repeatable. Default: all fields."),
    types: options.FieldTypes,
    calibrate: bool = option(True, "Measure recall and latency after the build.", "--calibrate/--no-calibrate"),
    threads: int | None = option(None, "CPU threads; with several workers, those of each. Default: all, divided among the workers.", min=1),
    overwrite: bool = options.OVERWRITE,
    wait: float = options.WAIT,
    output: options.Output,
) -> None:
    """Encode a corpus and index it. Repeat the command to resume an interrupted build.

    Encoding can be distributed over GPUs (--devices 0,1), processes (--workers 4) or a Ray cluster (--executor ray --address HOST:6379),
    whose nodes need Quiver, the model and the index folder under the same paths. The index has the same bytes as one built by a
    single process.

    Examples: quiver index build data/scifact --model MODEL --out indexes/scifact

    quiver index build docs --model bm25 --out indexes/words

    quiver index build products.csv --id sku --title name --text description --field price --model MODEL --out indexes/products
    """
    from quiver.retrieval.data.source import STANDARD_INPUT, open_corpus, tokens_of
    from quiver.retrieval.index import BuildOptions, build_index
    from quiver.retrieval.index.engines import parse_engine
    from quiver.retrieval.models.loading import load_index_model

    chosen = parse_engine(engine)
    layout = BuildOptions(chosen.name, chosen.settings, seed, memory, use_title, store_text, field or None, calibrate, threads)
    executor = encoding.open_executor()
    if source != STANDARD_INPUT:
        next(iter(open_corpus(source, given)), None)  # a wrong name of a field is found before the model is loaded
    loaded = load_index_model(options.at_revision(model, revision), **encoding.model_arguments(), options=settings)
    begun = time.monotonic()
    index = build_index(
        open_corpus(source, given, tokens_of(loaded)),
        loaded,
        out,
        options=layout,
        executor=executor,
        overwrite=overwrite,
        wait=wait,
        progress=output.progress,
        **types.arguments(),
    )
    _describe(index, output.json)
    if not output.json:
        folder, passages = shlex.quote(str(out)), {"file", "type", "start", "end"} <= index.fields.keys()  # of files
        files = f" passages of {index.facets(['file'])['file'].distinct:,} files" if passages else f" document{'s' * (len(index) != 1)}"
        say(f"{len(index):,}{files} in {time.monotonic() - begun:,.1f} s")
        say(f"search it: quiver search {folder} 'your question'\nserve it:  quiver serve {folder}")


@app.command("add")
@command
def add(
    folder: Path = options.INDEX_FOLDER,
    source: str = options.SOURCE,
    *,
    model: options.IndexModel,
    batch_tokens: int | None = options.BATCH_TOKENS,
    given: SourceOptions,
    types: options.FieldTypes,
    replace: bool = option(False, "Replace documents of the same id, with all passages of a file."),
    memory: int = options.MEMORY,
    wait: float = options.WAIT,
    output: options.Output,
) -> None:
    """Add documents to an index. Repeat the command to resume an interrupted addition.

    Ids of files, and of rows without ids, begin with the name of the folder or table: manual/intro.md#1, more.csv#1.

    Without options of the source, those are used that the index was built with from a source of the same kind.

    Example: quiver index add indexes/scifact more.jsonl
    """
    from quiver.retrieval.data.source import DEFAULTS, open_corpus, tokens_of
    from quiver.retrieval.index import add_documents, open_index

    opened = open_index(folder)
    loaded = model.load(opened, batch_tokens)
    corpus = source if given == DEFAULTS else open_corpus(source, given, tokens_of(loaded))
    index = add_documents(
        folder, corpus, loaded, replace_existing=replace, memory=memory, wait=wait, progress=output.progress, **types.arguments()
    )
    _describe_change(index, opened, output.json)


def _describe_change(index: IndexReader, before: IndexReader, as_json: bool) -> None:
    change = len(index) - len(before)
    line = f"{index.path}: {len(index):,} documents, {abs(change):,} {'fewer' if change < 0 else 'more'} than before"
    _describe(index, as_json) if as_json else say(line)


@app.command("refresh")
@command
def refresh(
    folder: Path = options.INDEX_FOLDER,
    source: str | None = argument("Corpus to read again. Default: all sources that the index was made of.", None, metavar="[SOURCE]"),
    *,
    model: options.IndexModel,
    batch_tokens: int | None = options.BATCH_TOKENS,
    given: SourceOptions,
    types: options.FieldTypes,
    dry_run: bool = options.DRY_RUN,
    force: bool = option(False, "Delete even more than half of the documents, or any where SOURCE takes the place of another."),
    memory: int = options.MEMORY,
    wait: float = options.WAIT,
    output: options.Output,
) -> None:
    """Read the sources of an index again: encode what is new or changed, delete what is gone. Repeat the command to resume.

    An index remembers its sources and their options (--text, --passages, --include, ...); options given here replace those of SOURCE.

    Examples: quiver index refresh indexes/manual

    quiver index refresh indexes/manual docs --exclude drafts --dry-run
    """
    from quiver.retrieval.index import open_index, refresh_index

    changed = given != SourceOptions()
    if changed and source is None:
        raise InputError("options of a source need the source: quiver index refresh DIR SOURCE --include ...")
    done = refresh_index(
        folder,
        model.load(open_index(folder), batch_tokens),
        source,
        options=given if changed else None,
        dry_run=dry_run,
        force=force,
        memory=memory,
        wait=wait,
        progress=output.progress,
        **types.arguments(),
    )
    counts = {name: getattr(done, name) for name in ("added", "changed", "deleted", "unchanged")}
    generation = done.index.manifest.generation
    listed = ("would be: " if dry_run else "") + ", ".join(f"{count:,} {name}" for name, count in counts.items())
    passages = " passages" if {"file", "start"} <= done.index.fields.keys() else ""  # of files, which have several each
    record = {"folder": str(folder), "generation": generation, "dry_run": dry_run, **counts}
    print_result(record, f"{folder}: {listed}{passages} (generation {generation})", json=output.json)


@app.command("delete")
@command
def delete(
    folder: Path = options.INDEX_FOLDER,
    ids: tuple[str, ...] = argument("Ids of the documents to delete.", ()),
    *,
    file: Path | None = options.DOCUMENT_IDS,
    where: tuple[str, ...] = option((), "Delete all documents that match a SQL condition, as search --filter. Repeatable; all must hold."),
    wait: float = options.WAIT,
    json: bool = options.JSON,
) -> None:
    """Delete documents. Their space is freed by quiver index compact.

    The documents of a folder are passages of its files, with ids such as guide.md#1; a whole file goes with quiver index refresh DIR FOLDER
    --exclude FILE.

    Examples: quiver index delete indexes/scifact 4983 31715818

    quiver index delete indexes/notes --where "created < '2020-01-01'"
    """
    from quiver.retrieval.index import delete_documents, open_index

    wanted = [*ids, *([] if file is None else read_ids(file))]
    if not (wanted or where):
        raise InputError("pass the ids of the documents to delete, --ids FILE, or --where CONDITION")
    before = open_index(folder)
    wanted += before.ids_matching(where) if where else []
    _describe_change(delete_documents(folder, wanted, wait=wait), before, json)


@app.command("compact")
@command
def compact(
    folder: Path = options.INDEX_FOLDER, *, memory: int = options.MEMORY, wait: float = options.WAIT, output: options.Output
) -> None:
    """Merge segments and remove deleted documents, without encoding anything again.

    Example: quiver index compact indexes/scifact
    """
    from quiver.retrieval.index import compact_index

    _describe(compact_index(folder, memory=memory, wait=wait, progress=output.progress), output.json)


@app.command("calibrate")
@command
def calibrate(
    folder: Path = options.INDEX_FOLDER,
    *,
    queries: Path | None = option(None, "File of real queries, as search reads it. Default: queries made from documents."),
    model: options.IndexModel,
    k: tuple[int, ...] = option((), "Number of results per query. Repeatable. Default: 10 and 100.", min=1),
    count: int = option(200, "Largest number of queries to search.", min=1),
    seed: int = options.SEED,
    wait: float = options.WAIT,
    output: options.Output,
) -> None:
    """Measure recall and latency of search parameters from cheap to exhaustive. Searches then choose among them.

    quiver search --effort balanced, the default, uses the fastest parameters with a recall of 0.95, --effort fast those with 0.90,
    --effort exact searches exhaustively; --target-recall uses the fastest that reach another recall.

    Example: quiver index calibrate indexes/scifact --queries queries.jsonl -k 10
    """
    from quiver.retrieval.data.corpus import read_queries
    from quiver.retrieval.index import calibrate_index, open_index
    from quiver.retrieval.index.calibration import HITS, LEAST_HITS

    wanted, texts, loaded = k or HITS, None, None
    if queries is not None:
        texts = [query.text for query in read_queries(queries)]
        loaded = model.load(open_index(folder))
    elif model.model is not None:
        raise InputError("--model encodes the queries of --queries; pass --queries FILE too, or remove --model")
    elif min(wanted) < LEAST_HITS:
        raise InputError(f"-k must be at least {LEAST_HITS} without --queries, because the documents a query was made from do not count")
    index = calibrate_index(folder, loaded, queries=texts, count=count, ks=wanted, seed=seed, wait=wait, progress=output.progress)
    if output.json:
        print_json(index.manifest.calibration)
    else:
        _print_calibration(index)


@app.command("check")
@command
def check(folder: Path = options.INDEX_FOLDER, *, output: options.Output) -> None:
    """Read every file and verify its checksum. Exit status 1 if the index is damaged.

    Example: quiver index check indexes/scifact
    """
    from quiver.retrieval.index import check_index

    with progress_bar("checking", 1, enabled=output.progress):
        report = check_index(folder)
    generations = [{"generation": each.generation, "problems": each.problems} for each in report.generations]
    whole = {"folder": str(folder), "whole": not report.problems, "head": report.head_problems, "generations": generations}
    lines = []
    for each in report.generations:
        lines += [f"generation {each.generation}: {'damaged' if each.problems else 'intact'}", *(f"  {one}" for one in each.problems)]
    lines += [*report.head_problems, *(f"left over from an interrupted build or commit: {path}" for path in report.leftovers)]
    if not report.generations and not report.head_problems:
        lines.append("nothing has been committed yet")
    print_result({**whole, "leftovers": list(map(str, report.leftovers))}, *lines, json=output.json)
    if report.problems:
        raise typer.Exit(1)


@app.command("repair")
@command
def repair(
    folder: Path = options.INDEX_FOLDER,
    *,
    model: options.IndexModel,
    encode: bool = option(
        True, "Encode damaged documents again whose text is stored or in a source; else they are lost.", "--encode/--no-encode"
    ),
    dry_run: bool = options.DRY_RUN,
    wait: float = options.WAIT,
    output: options.Output,
) -> None:
    """Repair a damaged index: keep what is intact, encode damaged documents again, and list what is lost.

    Damaged files are moved to the folder quarantine/ inside the index. Nothing is deleted.

    Example: quiver index repair indexes/scifact --dry-run
    """
    from quiver.retrieval.index import repair_index

    with progress_bar("repairing", 1, enabled=output.progress):
        report = repair_index(folder, model=model.model, device=model.device, encode_again=encode, dry_run=dry_run, wait=wait)
    record = {**dataclasses.asdict(report), "quarantined": list(map(str, report.quarantined))}
    print_result(record, *_describe_repair(folder, report), json=output.json)


def _describe_repair(folder: Path, report: RepairReport) -> Iterator[str]:
    """Describe what a repair did or would do."""
    if not report.problems:
        yield f"{folder}: intact, nothing to repair ({report.documents:,} documents)"
        return
    yield from report.problems
    for what, ids in (("encoded again", report.encoded), ("lost", report.lost)):
        if ids:
            yield f"{len(ids):,} documents {what}: {' '.join(ids)}"
    if report.lost_unnamed:
        yield f"{report.lost_unnamed:,} documents lost together with their ids"
    if report.undone_deletions:
        yield f"{report.undone_deletions:,} deleted documents are back, because the record of their deletion is lost"
    before = "an unknown number of" if report.documents_before is None else f"{report.documents_before:,}"
    if report.dry_run:
        yield f"{folder}: a repair would keep {report.documents:,} of {before} documents (generation {report.restored})"
        return
    yield f"{folder}: generation {report.generation} keeps {report.documents:,} of {before} documents of generation {report.restored}"
    if report.quarantined:
        yield f"{len(report.quarantined)} files and folders are in {report.quarantined[0].parent}; delete it when you no longer need them"


@app.command("info")
@command
def info(
    folder: Path = options.INDEX_FOLDER,
    *,
    generation: int | None = options.GENERATION,
    verify: bool = options.VERIFY,
    json: bool = options.JSON,
) -> None:
    """Show the size, settings, model, fields and presets of an index.

    Example: quiver index info indexes/scifact --json
    """
    from quiver.retrieval.index import open_index

    _describe(open_index(folder, generation=generation, verify=verify), json)


@app.command("export")
@command
def export(
    folder: Path = options.INDEX_FOLDER,
    *,
    out: Path = option(..., "Folder to write; must be new or empty.", "-o"),
    vectors: Literal["npy", "safetensors"] = option("npy", "File format of the vectors in --out."),
    verify: bool = options.VERIFY,
    output: options.Output,
) -> None:
    """Export documents as JSON Lines and vectors as arrays in the same order, for the clients of other stores.

    An index without stored texts exports ids only, an index of BM25 documents only.

    Example: quiver index export indexes/scifact --out exported --vectors safetensors
    """
    from quiver.retrieval.index import open_index
    from quiver.retrieval.index.export import export_index

    described = export_index(open_index(folder, verify=verify), out, vectors=vectors, progress=output.progress)
    vectors_there = f", {described['arrays']['vectors'][0]:,} vectors" if described["arrays"] else ""
    line = f"{out}: {described['documents']:,} documents{vectors_there} in {', '.join(described['files'])}"
    print_result({"folder": str(out), **described}, line, json=output.json)


def _source_line(source: IndexSource) -> str:
    """A source with the options that `index refresh` reads it with, as they are typed."""
    words = [source.source]
    for name, value in dataclasses.asdict(dataclasses.replace(source.options, label="")).items():
        values = [",".join(value)] if name == "columns" else [value] if isinstance(value, str) else value or ()
        words += [word for each in values if each for word in (GROUPS[SourceOptions][name].names(name)[0], each)]
    begin = f"{source.options.label}{'/' if source.is_files and Path(source.source).is_dir() else '#'}"
    return shlex.join(words) + (f" (ids begin with {begin})" if source.options.label else "")


def _describe(index: IndexReader, as_json: bool) -> None:
    from quiver.retrieval.index.sources import read_sources

    manifest, sources = index.manifest, read_sources(index.path).sources
    if as_json:
        recalls = index.preset_recall().items()
        content = {
            "folder": str(index.path),
            "verified": index.verified,
            "documents": len(index),
            "deleted": manifest.deleted,
            "vectors": manifest.vectors,
            "bytes": manifest.bytes,
            "fields": dict(index.fields),
            "sources": [{"source": each.source, "options": dataclasses.asdict(each.options)} for each in sources],
            **dataclasses.asdict(manifest),
            "kind": manifest.codec.engine,
            "tokens": dataclasses.asdict(manifest.tokens),
            "presets": index.presets(),
            "preset_recall": {str(k): {name: dataclasses.asdict(each) for name, each in presets.items()} for k, presets in recalls},
        }
        print_json(content)
        return
    tokens, words = manifest.tokens, manifest.model.kind == "bm25"
    rows: list[tuple[str, object]] = [
        ("kind", manifest.codec.engine),
        *((name, "none" if value is None else value) for name, value in index.parameters.items()),
        ("documents", f"{len(index):,}"),
        ("deleted documents", f"{manifest.deleted:,}"),
        ("segments", f"{len(manifest.segments):,}"),
        ("words" if words else "vectors", f"{manifest.vectors:,}"),
        ("tokens", None if words else f"{tokens.tokens:,}"),
        ("truncated documents", None if words else f"{tokens.truncated:,}"),
        ("empty documents", f"{tokens.empty:,}"),
        ("fields", ", ".join(f"{name} ({kind})" for name, kind in index.fields.items()) or "none"),
        ("size", f"{manifest.bytes / 1e6:,.1f} MB"),
        *(("source", _source_line(each)) for each in sources),
        ("model", manifest.model.source),
        ("model dtype", None if words else manifest.model.dtype),
        ("fingerprint", manifest.model.fingerprint[:16]),
        ("generation", f"{manifest.generation} ({manifest.operation})"),
        ("created", manifest.created),
        ("verification", "each block when it is first read" if index.verified else "off (--no-verify)"),
    ]
    print_table(str(index.path), ("", "value"), [(name, str(value)) for name, value in rows if value is not None])
    if not words:
        _print_presets(index)


def _print_presets(index: IndexReader) -> None:
    """Print the presets with their search parameters and the measured recall and latency."""
    tables = () if index.calibration is None else index.calibration.tables
    table = next((each for each in tables if each.k == 10), tables[0] if tables else None)
    k, points = (10, ()) if table is None else (table.k, table.points)
    measured = {_show_params(point.search_params): point for point in points}
    rows = []
    for name, params in index.presets(k).items():
        point = measured.get(_show_params(params))
        shown = ("not measured" if params else "exact", "-") if point is None else (_show_recall(point), f"{point.p50_ms:.2f}")
        rows.append((name, _show_params(params), *shown))
    title = f"presets for {k} results"
    if index.calibration is not None and table is not None:
        title += f", measured with {table.queries} queries on {index.calibration.documents:,} documents"
    print_table(title, ("preset", "search parameters", "recall", "p50 (ms)"), rows)
    if index.calibration is not None and (advice := index.calibration.advice()):
        say(f"{index.path}: {advice}")


def _print_calibration(index: IndexReader) -> None:
    """Print every measured point of the parameter grid."""
    rows = []
    for table in () if index.calibration is None else index.calibration.tables:
        presets = {name: _show_params(params) for name, params in index.presets(table.k).items()}
        for point in table.points:
            text = _show_params(point.search_params)
            names = ", ".join(name for name, params in presets.items() if params == text)
            rows.append((str(table.k), names, text, _show_recall(point), f"{point.p50_ms:.2f}", f"{point.p95_ms:.2f}"))
    print_table(str(index.path), ("k", "preset", "search parameters", "recall", "p50 (ms)", "p95 (ms)"), rows)


def _show_params(params: Mapping[str, Setting]) -> str:
    if not params or params.get("exhaustive"):
        return "exhaustive"
    return ", ".join(f"{name}={value:g}" for name, value in params.items() if isinstance(value, int | float) and value)


def _show_recall(point: GridPoint) -> str:
    return f"{point.recall:.3f} ({point.low:.3f}-{point.high:.3f})"
