"""``quiver index build | info`` and ``quiver search``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from encoder import InputError
from encoder.files import check_target
from retrieval.biencoder import BiEncoder
from retrieval.cli.output import (
    Int8Option,
    JsonOption,
    OverwriteOption,
    ProgressOption,
    help_alone,
    print_json,
    print_table,
    say,
    show_progress,
)
from retrieval.colbert import ColBERT
from retrieval.corpus import read_queries
from retrieval.indexes import IndexFolder, build_index, open_index
from retrieval.models import load_model
from retrieval.records import Query
from retrieval.run import write_run
from retrieval.search import search as run_search

app = typer.Typer(invoke_without_command=True, callback=help_alone, help="Build and look at indexes.")

# Characters of a found document that are shown.
EXCERPT = 160


@app.command("build", epilog="Example: quiver index build data/scifact --model MODEL --out indexes/scifact")
def build(
    corpus: Annotated[Path, typer.Argument(help="A folder with corpus.jsonl[.gz], or such a file.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub id of a bi-encoder or a ColBERT.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    int8: Annotated[bool, Int8Option] = False,
    title: Annotated[bool, typer.Option("--title/--no-title", help="Put titles before the texts.")] = True,
    text: Annotated[bool, typer.Option("--text/--no-text", help="Keep the texts, so that search can show them.")] = True,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Encode a corpus and index it exactly."""
    loaded = load_model(model, precision="int8" if int8 else "float")
    shown = show_progress(progress)
    built = build_index(corpus, loaded, out, use_title=title, store_text=text, overwrite=overwrite, progress=shown)
    _describe(built, as_json)


@app.command("info", epilog="Example: quiver index info indexes/scifact --json")
def info(
    folder: Annotated[Path, typer.Argument(help="An index.")],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read every file and compare its checksum.")] = True,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Say what an index holds and who built it."""
    _describe(open_index(folder, verify=verify), as_json)


def _describe(index: IndexFolder, as_json: bool) -> None:
    manifest = index.manifest
    sizes = sum(entry.bytes for entry in manifest.files.values())
    if as_json:
        print_json({"folder": str(index.path), "documents": len(index), "bytes": sizes, **dataclasses.asdict(manifest)})
        return
    tokens = manifest.tokens
    rows = [
        ("kind", manifest.kind),
        ("documents", f"{len(index):,}"),
        ("tokens", f"{tokens.tokens:,}"),
        ("truncated documents", f"{tokens.truncated:,}"),
        ("empty documents", f"{tokens.empty:,}"),
        ("size", f"{sizes / 1e6:,.1f} MB"),
        ("model", manifest.model.source),
        ("precision", manifest.model.precision),
        ("fingerprint", manifest.model.fingerprint[:16]),
        ("created", manifest.created),
    ]
    print_table(str(index.path), ("", "value"), rows)


def search(
    folder: Annotated[Path, typer.Argument(help="An index.")],
    text: Annotated[str | None, typer.Argument(help="The query.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Documents a query; capped at the index's.")] = 10,
    queries: Annotated[Path | None, typer.Option("--queries", help="Queries from a .jsonl[.gz] or .tsv file instead.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Write a TREC run there (with --queries).")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model; by default the one that built the index.")] = None,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Search an index by one text or by a file of queries.

    Examples: quiver search indexes/scifact "vitamin D and bones" -k 5

    quiver search indexes/scifact --queries queries.jsonl --run runs/scifact.trec -k 1000
    """
    if (text is None) == (queries is None):
        raise InputError("give either a query text or --queries FILE")
    if (queries is None) != (run is None):
        raise InputError("--queries FILE and --run FILE go together")
    asked = [Query("query", text)] if text is not None else list(read_queries(queries or Path()))
    index = open_index(folder)
    if run is not None:
        _check_run(run, asked, index)
    loaded = _model_of(index) if model is None else load_model(model, precision=index.manifest.model.precision)
    found = run_search(index, loaded, asked, k, progress=show_progress(progress))
    if run is not None:
        write_run(found.run, run, tag="quiver")
        say(f"{run}: {len(asked)} queries, {sum(map(len, found.run.values()))} documents")
        return
    hits = [_hit(index, rank, document, score) for rank, (document, score) in enumerate(found.run["query"].items(), start=1)]
    if as_json:
        print_json(hits)
        return
    rows = [(hit["id"], f"{hit['score']:.4f}", hit.get("text", "")) for hit in hits]
    print_table(f"{len(hits)} of {len(index):,} documents", ("document", "score", "text"), rows)


def _check_run(run: Path, asked: Sequence[Query], index: IndexFolder) -> None:
    """Find out before the queries are encoded that their run could not be written."""
    check_target(run)
    for kind, ids in (("query", [query.id for query in asked]), ("document", index.ids)):
        for key in ids:
            if key.split() != [key]:
                raise InputError(f"{run}: a run cannot hold the {kind} id {key!r}: ids must be without white space")


def _model_of(index: IndexFolder) -> BiEncoder | ColBERT:
    card = index.manifest.model
    try:
        return load_model(card.source, precision=card.precision)
    except InputError as error:
        raise InputError(f"{error}; the index was built with that model: give --model if it has moved") from error


def _hit(index: IndexFolder, rank: int, document: str, score: float) -> dict[str, Any]:
    hit: dict[str, Any] = {"rank": rank, "id": document, "score": score}
    if index.manifest.store_text:
        flat = " ".join(index.text_of(document).split())
        hit["text"] = flat if len(flat) <= EXCERPT else flat[: EXCERPT - 1] + "…"
    return hit
