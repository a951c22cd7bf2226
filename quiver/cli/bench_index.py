"""``quiver bench index``: indexes beside other libraries' on the same vectors; like bench.py beside it, it may import eval."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from quiver.cli.output import (
    CacheOption,
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
from quiver.encoder import InputError
from quiver.eval.bench.encoder.results import NotRun
from quiver.eval.bench.index import (
    PEERS,
    TIMEOUT,
    IndexBenchmark,
    IndexSettings,
    Running,
    VectorFolder,
    bench_index,
    default_peers,
    encode_collection,
    filtered,
    own_points,
    own_system,
    peer_systems,
    threads_up_to,
    to_json,
    write_index_benchmark,
)
from quiver.eval.bench.index.systems import System
from quiver.eval.report.efficiency_plot import check_out
from quiver.eval.report.index_quality import (
    search_table,
    size_table,
    throughput_table,
    write_index_quality_page,
    write_index_quality_plot,
    write_index_quality_report,
)

RESULTS = "results.json"
# Where a collection's vectors are while they are measured, below the folder of the work.
VECTORS = "vectors"


def index(
    data: Annotated[
        Path, typer.Argument(help="A BEIR folder, or a folder of vectors: documents.npy, queries.npy and, for a ColBERT, their lengths.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Encodes a BEIR folder: folder or hub id of a bi-encoder or a ColBERT.")
    ] = None,
    split: Annotated[str, typer.Option(help="Its judgements.")] = "test",
    limit_docs: Annotated[int | None, typer.Option(min=1, help="Only its first documents, and queries about them.")] = None,
    limit_queries: Annotated[int, typer.Option(min=1, help="The first so many queries.")] = 200,
    cache: Annotated[Path | None, CacheOption] = None,
    no_cache: Annotated[bool, NoCacheOption] = False,
    synthetic: Annotated[
        int | None, typer.Option(min=1, help="So many documents, noisy copies beyond those there are: for latency and size alone.")
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", help="Of Quiver, with settings: ivf-tokens:bits=3, exact; may be repeated; by default auto and exact."),
    ] = None,
    efforts: Annotated[
        list[str] | None,
        typer.Option("--effort", help="exact, balanced, fast or knobs as in nprobe=8,candidates=50; may be repeated; by default balanced."),
    ] = None,
    shares: Annotated[
        list[float] | None,
        typer.Option(
            "--allowed", help="Search Quiver's again where a filter lets only such a share be found, as in 0.01; may be repeated."
        ),
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", help=f"{', '.join(PEERS)}; faiss:HNSW32 for a factory string; may be repeated; by default all of the kind."),
    ] = None,
    alone: Annotated[bool, typer.Option("--no-peers", help="Measure Quiver alone.")] = False,
    k: Annotated[int, typer.Option("-k", min=1, help="Hits of the searches that are timed.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Timed passes over all queries.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Queries a second are measured with 1, 2, 4 to so many threads; builds use all.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    timeout: Annotated[
        float,
        typer.Option(min=0.01, help="Minutes that a library may take for one build or one pass over the queries; then it is left out."),
    ] = TIMEOUT / 60,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help=f"Folder for {RESULTS}, report.md, report.html, plot.png and plot.svg.")
    ] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Measure indexes beside other libraries' on the same vectors: recall against exact search, latency, bytes, build, memory.

    A run that was stopped goes on with the systems that were not finished when it is started again with the same --out.

    Examples: quiver bench index data/scifact --model MODEL --engine auto --engine exact --effort balanced --effort fast --out bench-index;
    quiver bench index vectors --engine ivf-tokens:bits=4 --engine ivf-tokens:bits=3 --peer fast-plaid --threads 2 --out bench-index
    """
    if out is not None:
        check_out(out, RESULTS, overwrite=overwrite)
    shown = show_progress(progress)
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        work = Path(temporary) if out is None else out / "work"
        if overwrite and out is not None:
            for finished in ("systems", "indexes"):
                shutil.rmtree(work / finished, ignore_errors=True)
        try:
            folder = _vectors(data, model, split, work / VECTORS, cache=(cache, no_cache), limit_docs=limit_docs, progress=shown)
            folder = replace(folder, synthetic=synthetic, seed=seed, limit_queries=limit_queries)
            folder.check()
            result = bench_index(
                folder,
                _systems(folder, engines or ["auto", "exact"], (efforts or [], shares or []), [] if alone else peers),
                IndexSettings(k=k, deep=max(100, k), rounds=rounds, threads=threads_up_to(threads), build_threads=threads),
                work=work,
                names=(data.resolve().name, model),
                command=command_line(),
                running=Running(progress=shown, timeout=60 * timeout),
            )
        finally:
            if (
                model is not None
            ):  # as large as the collection, and written anew, from the cache of vectors, whenever the command is started
                shutil.rmtree(work / VECTORS, ignore_errors=True)
    if out is not None:
        write_index_quality_report(result, out / "report.md")
        write_index_quality_page(result, out / "report.html")
        write_index_quality_plot(result, out)
        write_index_benchmark(result, out / RESULTS)
    if as_json:
        print_json(to_json(result))
        return
    _print(result)
    if out is not None:
        say(f"results: {out / RESULTS}\nreport: {out / 'report.md'}, {out / 'report.html'}\nplot: {out / 'plot.png'}")


def _vectors(
    data: Path,
    model: str | None,
    split: str,
    out: Path,
    *,
    cache: tuple[Path | None, bool],
    limit_docs: int | None,
    progress: bool,
) -> VectorFolder:
    """The vectors to measure on: those that are given, or those of a collection under a model."""
    if model is None:
        if limit_docs is not None or cache[0] is not None:
            raise InputError("--limit-docs and --cache are for a collection that --model encodes")
        return VectorFolder(data)
    return encode_collection(data, model, split, out, cache=vector_cache(*cache), limit_docs=limit_docs, progress=progress)


def _systems(folder: VectorFolder, engines: list[str], searches: tuple[list[str], list[float]], peers: list[str] | None) -> list[System]:
    """What is measured, each once; Quiver's at these efforts, and where these shares of the documents may be found."""
    efforts, shares = searches
    points = own_points(efforts)
    systems = [filtered(own_system(text, points), shares, len(folder)) for text in engines]
    for text in default_peers(folder.kind) if peers is None else peers:
        systems += peer_systems(text, kind=folder.kind, documents=len(folder), dim=folder.dim)
    return list({system.name: system for system in systems}.values())


def _print(result: IndexBenchmark) -> None:
    print_table("Search", *search_table(result))
    if (answered := throughput_table(result)) is not None:
        print_table("Queries a second", *answered)
    print_table("Build, disk and memory", *size_table(result))
    not_run: tuple[NotRun, ...] = result.not_run
    if not_run:
        print_table("Not run", ("", "why"), [(each.what, each.reason) for each in not_run])
