"""``quiver bench``: speed, memory and quality beside other libraries in the same run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from quiver.cli import options
from quiver.cli.output import command_line, help_alone, print_json, print_table, say, vector_cache
from quiver.encoder.errors import InputError

if TYPE_CHECKING:
    from quiver.eval.bench.encoder import Workload
    from quiver.eval.bench.encoder_backends import Settings as EncoderSettings
    from quiver.eval.bench.index_backends import System
    from quiver.eval.bench.index_data import VectorFolder
    from quiver.eval.bench.results import Benchmark

app = typer.Typer(
    invoke_without_command=True, callback=help_alone, help="Measure speed, memory and quality beside other libraries in the same run."
)

# Names of help texts are literals, so that --help imports no library; a test compares them with what exists.
SETS = ("fixed-512", "variable-256", "fixed-8192", "variable-4096")
BACKENDS = ("quiver-optimized", "quiver-int8", "quiver-compiled", "transformers-sdpa", "transformers-flash")
TEXT_BACKENDS = (
    "quiver-int8",
    "sentence-transformers",
    "sentence-transformers-onnx",
    "sentence-transformers-onnx-int8",
    "sentence-transformers-openvino",
    "sentence-transformers-openvino-int8",
)
WORKLOADS = ("msmarco", "long")
KINDS = ("dense", "colbert", "mlm")
STAGES = ("tests", "encoder-base", "encoder-large", "texts", "training", "queries", "search", "profile")
BASELINES = ("faiss", "hnswlib", "usearch", "fast-plaid", "warp", "voyager")

RESULTS, REPORT, PAGE, PLOT = "results.json", "report.md", "report.html", "plot.png"
"""Files in the output folder."""

TEXTS = 500
"""Default number of documents of --data to encode."""

# Folder with the vectors of a collection while they are measured, inside the work folder.
_VECTORS = "vectors"

BenchOut: TypeAlias = Annotated[
    Path | None, typer.Option("--out", "-o", help=f"Folder to write: {RESULTS}, {REPORT}, {PAGE}, {PLOT}, plot.svg.")
]
NoBaselines: TypeAlias = Annotated[bool, typer.Option("--no-baselines", help="Measure Quiver alone.")]
PeakMemory: TypeAlias = Annotated[
    bool, typer.Option("--peak-memory", help="Measure peak memory too, in a fresh process per backend and case.")
]


@app.command("encoder")
def encoder(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Folder or hub id of the model, or a preset with random weights, such as modernbert-base.")
    ],
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", help="Texts to encode with a bi-encoder instead of token ids: BEIR folder or .jsonl[.gz] file."),
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help=f"Document set of the ModernBERT paper: {', '.join(SETS)}. Repeatable.")
    ] = None,
    lengths: Annotated[
        list[str] | None, typer.Option("--lengths", help="Document lengths in tokens, such as 512x8, 512x2+32x14, 4096+2500. Repeatable.")
    ] = None,
    table: Annotated[str, typer.Option(help="Cases without --set and --lengths: paper (four sets) or cpu (six small cases).")] = "paper",
    docs: Annotated[
        int | None,
        typer.Option(min=1, help=f"Documents of each --set (at most 8,192; default: one batch) or of --data ({TEXTS})."),
    ] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            help=f"Backend to compare with Quiver: {', '.join(BACKENDS)}; with --data {', '.join(TEXT_BACKENDS)}."
            " Repeatable. Default: other libraries that can run.",
        ),
    ] = None,
    no_baselines: NoBaselines = False,
    train: Annotated[bool, typer.Option("--train", help="Time forward and backward passes instead of inference.")] = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of timed rounds.")] = 10,
    seed: options.Seed = 42,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Documents per batch, the same for every backend.")] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Average tokens per batch instead of --batch-size. Default: 8,192, on a GPU 131,072.",
        ),
    ] = None,
    memory: PeakMemory = False,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Find the largest batch that fits in memory, for cases with texts of one length.")
    ] = False,
    memory_gib: Annotated[
        float | None, typer.Option(min=0.001, help="Memory that the largest batch must fit into, in GiB. Default: the whole GPU.")
    ] = None,
    out: BenchOut = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Time an encoder beside other libraries that run the same weights: tokens per second, memory, largest batch.

    Examples: quiver bench encoder --model modernbert-base --table cpu --threads 2 --peak-memory --out bench

    quiver bench encoder --model MODEL --data data/scifact --docs 500
    """
    from quiver.eval.bench import encoder as subject
    from quiver.eval.bench.encoder_backends import Settings
    from quiver.retrieval.models.loading import check_device, default_device, default_dtype

    place = check_device(device or default_device())
    settings = Settings(
        device=place,
        dtype=dtype or default_dtype(place),
        threads=threads,
        rounds=rounds,
        seed=seed,
        train=train,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        memory=memory,
        largest_batch=largest_batch,
        memory_gib=memory_gib,
    )
    _check_out(out, overwrite=overwrite)
    chosen = [] if no_baselines else backends
    if data is not None:
        if sets or lengths:
            raise InputError("--data is for texts, --set and --lengths are for token ids; give one of them")
        result = subject.bench_texts(
            model,
            _texts(data, docs or TEXTS),
            settings,
            name=data.name,
            backends=chosen,
            command=command_line(),
            progress=progress,
        )
    else:
        workloads = _workloads(sets or [], lengths or [], table, docs, settings)
        result = subject.bench_token_ids(model, workloads, settings, backends=chosen, command=command_line(), progress=progress)
    _finish(subject, result, out, as_json=as_json)


@app.command("training")
def training(
    model: Annotated[
        str, typer.Option("--model", "-m", help="Folder or hub id of the model, or a preset with random weights, such as ettin-17m.")
    ],
    workloads: Annotated[
        list[str] | None,
        typer.Option("--workload", help=f"Lengths of the training texts: {', '.join(WORKLOADS)}. Repeatable. Default: msmarco."),
    ] = None,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", help=f"Kind of model: {', '.join(KINDS)}. Repeatable. Default: dense and colbert.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="Loss of a single --kind, as in recipes. Default: mnrl; contrastive for a ColBERT.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", "-d", help="BEIR folder whose texts are used instead of synthetic ones.")] = None,
    split: options.Split = "train",
    no_baselines: NoBaselines = False,
    threads: options.Threads = None,
    rounds: Annotated[int, typer.Option(min=1, help="Number of timed steps per backend.")] = 5,
    seed: options.Seed = 42,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Rows per batch. Default: 32, and 4 for long texts.")] = None,
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        typer.Option("--dtype", help="bfloat16 (autocast), float32, or auto: bfloat16 on a GPU that has it, otherwise float32."),
    ] = "auto",
    dropout: Annotated[bool, typer.Option("--dropout", help="Use the checkpoint's dropout; losses are then not compared.")] = False,
    memory: PeakMemory = False,
    out: BenchOut = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Time training steps beside sentence-transformers, PyLate and transformers, with the same weights and batches, and compare losses.

    Examples: quiver bench training --model sentence-transformers/all-MiniLM-L6-v2 --threads 2 --peak-memory --out bench-training

    quiver bench training --model ettin-17m --workload long --data data/designdocs_long
    """
    from quiver.encoder.training.autocast import training_dtype
    from quiver.eval.bench import training as subject
    from quiver.eval.bench.training_backends import Settings
    from quiver.retrieval.models.loading import default_device

    settings = Settings(
        losses=_losses(kinds or list(KINDS[:2]), loss),
        dtype=training_dtype(dtype, default_device()),
        threads=threads,
        rounds=rounds,
        seed=seed,
        batch_size=batch_size,
        dropout=dropout,
        baselines=not no_baselines,
        memory=memory,
    )
    names = list(dict.fromkeys(workloads or ["msmarco"]))
    if unknown := [name for name in names if name not in subject.WORKLOADS]:
        raise InputError(f"unknown workload {unknown[0]!r}; choose from {', '.join(subject.WORKLOADS)}")
    _check_out(out, overwrite=overwrite)
    result = subject.bench_training(
        model,
        [subject.WORKLOADS[name] for name in names],
        settings,
        source=subject.synthetic_source if data is None else subject.texts_of_collection(data, split),
        command=command_line(),
        progress=progress,
    )
    _finish(subject, result, out, as_json=as_json)


@app.command("index")
def index(
    data: Annotated[
        Path,
        typer.Argument(
            help="BEIR folder, or folder of vectors: documents.npy and queries.npy; for ColBERT also lengths.npy and query_lengths.npy."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub id of a bi-encoder or a ColBERT model that encodes a BEIR folder."),
    ] = None,
    split: options.Split = "test",
    limit_docs: Annotated[int | None, typer.Option(min=1, help="Use only the first documents, and the queries about them.")] = None,
    limit_queries: Annotated[int, typer.Option(min=1, help="Use only the first queries.")] = 200,
    cache: options.Cache = None,
    no_cache: options.NoCache = False,
    synthetic: Annotated[
        int | None,
        typer.Option(min=1, help="Number of documents to index, noisy copies beyond the existing ones; measures latency and size only."),
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", help=f"{options.ENGINE} Repeatable. Default: auto and exact."),
    ] = None,
    efforts: Annotated[
        list[str] | None,
        typer.Option(
            "--effort",
            help=f"Search effort: {options.EFFORT} such as nprobe=8,k_factor=2. Repeatable. Default: balanced.",
        ),
    ] = None,
    shares: Annotated[
        list[float] | None,
        typer.Option("--filter-share", help="Also search with a filter that matches this share of documents, such as 0.01. Repeatable."),
    ] = None,
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline", help=f"Index library to compare: {', '.join(BASELINES)}, or faiss:FACTORY. Repeatable. Default: all of the kind."
        ),
    ] = None,
    no_baselines: NoBaselines = False,
    k: Annotated[int, typer.Option("-k", min=1, help="Number of results per query.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Number of timed passes over all queries.")] = 3,
    threads: Annotated[
        int, typer.Option(min=1, help="Largest number of threads: throughput is measured with 1, 2, 4, ... threads; builds use all.")
    ] = 1,
    seed: options.Seed = 0,
    time_limit: Annotated[
        float,
        typer.Option(
            "--time-limit", min=0.01, help="Time limit of one build or one pass over the queries, in seconds; slower systems are left out."
        ),
    ] = 7200.0,
    out: BenchOut = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Measure indexes beside other libraries on the same vectors: recall against exact search, latency, size, build cost, memory.

    An interrupted run resumes with the unfinished systems when the command is repeated with the same --out.

    Examples: quiver bench index data/scifact --model MODEL --engine auto --engine exact --effort balanced --effort fast --out bench-index

    quiver bench index vectors --engine ivf-tokens:bits=4 --engine ivf-tokens:bits=3 --baseline fast-plaid --threads 2 --out bench-index
    """
    from quiver.eval.bench import index as subject

    _check_out(out, overwrite=overwrite)
    counts = subject.threads_up_to(threads)
    settings = subject.Settings(k=k, deep=max(100, k), rounds=rounds, threads=counts, build_threads=threads)
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        work = Path(temporary) if out is None else out / "work"
        if overwrite and out is not None:
            for finished in ("finished", "indexes"):
                shutil.rmtree(work / finished, ignore_errors=True)
        try:
            folder = _vectors(data, model, split, work / _VECTORS, cache=(cache, no_cache), limit_docs=limit_docs, progress=progress)
            folder = replace(folder, synthetic=synthetic, seed=seed, limit_queries=limit_queries)
            folder.check()
            result = subject.bench_index(
                folder,
                _systems(folder, engines or ["auto", "exact"], efforts or [], shares or [], [] if no_baselines else baselines),
                settings,
                work=work,
                name=data.resolve().name,
                model=model,
                command=command_line(),
                running=subject.Running(progress=progress, timeout=time_limit),
            )
        finally:
            # As large as the collection, and written again from the cache of vectors when the command is repeated.
            if model is not None:
                shutil.rmtree(work / _VECTORS, ignore_errors=True)
    _finish(subject, result, out, as_json=as_json)


@app.command("gpu")
def gpu(
    out: Annotated[Path, typer.Option("--out", "-o", help=f"Folder to write: {RESULTS}, {REPORT}, charts, {PAGE}, stages.log.")],
    minutes: Annotated[float, typer.Option(min=0.1, help="Time for all stages, in minutes.")] = 8.5,
    stages: Annotated[
        list[str] | None, typer.Option("--stage", help=f"Stage to run: {', '.join(STAGES)}. Repeatable. Default: all.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Device: cuda, or cpu for a small form that tests the benchmark. Default: cuda if there is a GPU.")
    ] = None,
    seed: options.Seed = 42,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Measure a GPU in one command: gpu tests, encoders, text to vectors, training, queries, search and a profile.

    The command writes results after each stage. Repeat it with the same --out to go on after an interruption.

    Examples: quiver bench gpu --out bench-gpu

    quiver bench gpu --out bench-profile --stage profile --minutes 2
    """
    from quiver.eval.bench.gpu import LOG, Settings, as_record, bench_gpu, report
    from quiver.eval.bench.report import tables
    from quiver.retrieval.models.loading import default_device

    chosen = device or default_device()
    if chosen not in ("cpu", "cuda"):
        raise InputError(f"--device must be cuda or cpu, got {chosen!r}; choose a GPU by CUDA_VISIBLE_DEVICES")
    if unknown := [name for name in stages or [] if name not in STAGES]:
        raise InputError(f"unknown stage {unknown[0]!r}; choose from {', '.join(STAGES)}")
    if chosen == "cpu":
        typer.echo("no GPU is used: tiny models and data; the figures say nothing about GPUs", err=True)
    settings = Settings("cuda" if chosen == "cuda" else "cpu", minutes, seed)
    result = bench_gpu(
        out,
        settings,
        stages=stages,
        overwrite=overwrite,
        command=command_line(),
        say=lambda line: typer.echo(line, err=True),
    )
    if as_json:
        print_json(as_record(result))
        return
    for title, header, rows in tables(report(result)):
        print_table(title, header, rows)
    say(f"results: {out / RESULTS}\nreport: {out / REPORT}\nlog: {out / LOG}")


def _check_out(out: Path | None, *, overwrite: bool) -> None:
    """Check before the benchmark that results and plots can be written."""
    if out is not None:
        from quiver.eval.bench.harness import check_out
        from quiver.eval.report.charts import check_matplotlib

        check_matplotlib()
        check_out(out, RESULTS, overwrite=overwrite)


def _finish(subject: ModuleType, result: Benchmark, out: Path | None, *, as_json: bool) -> None:
    """Write results, report and plots, and print the tables or JSON."""
    from quiver.eval.bench.report import tables, write_report
    from quiver.eval.bench.results import to_json, write_benchmark

    report = subject.report(result)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_report(report, out, draw=lambda: subject.draw(result))
        write_benchmark(result, out / RESULTS)
    if as_json:
        print_json(to_json(result))
        return
    for title, header, rows in tables(report):
        print_table(title, header, rows)
    if out is not None:
        say(f"results: {out / RESULTS}\nreport: {out / REPORT}, {out / PAGE}\nplot: {out / PLOT}")


def _texts(data: Path, docs: int) -> list[str]:
    """Documents spread evenly over the corpus."""
    from quiver.retrieval.data.corpus import read_documents

    contents = [document.content() for document in read_documents(data)]
    if not contents:
        raise InputError(f"{data}: no documents")
    count = min(docs, len(contents))
    return [contents[position * len(contents) // count] for position in range(count)]


def _workloads(sets: list[str], lengths: list[str], table: str, docs: int | None, settings: EncoderSettings) -> list[Workload]:
    from quiver.eval.bench.encoder import CPU_TABLE, PAPER_SETS, default_documents, paper_workload, parse_lengths

    if table not in ("paper", "cpu"):
        raise InputError(f"--table must be paper or cpu, got {table!r}")
    if not sets and not lengths:
        if table == "cpu":
            lengths = list(CPU_TABLE)
        else:
            sets = list(PAPER_SETS)
    if docs is not None and not sets:
        raise InputError("--docs is for --set and --data; --lengths has the number of documents itself, such as 512x8")
    named = [paper_workload(name, documents=docs or default_documents(name, settings)) for name in sets]
    return [*named, *map(parse_lengths, lengths)]


def _losses(kinds: list[str], loss: str | None) -> dict[str, str]:
    """Kind -> loss: the first of each kind unless one is named."""
    from quiver.eval.bench.training_backends import LOSSES

    if unknown := [kind for kind in kinds if kind not in LOSSES]:
        raise InputError(f"--kind must be one of {', '.join(LOSSES)}, got {unknown[0]!r}")
    if loss is None:
        return {kind: LOSSES[kind][0] for kind in kinds}
    if len(set(kinds)) > 1:
        raise InputError("--loss needs a single kind of model; add one --kind")
    return {kinds[0]: loss}


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
    """The given vectors, or those of a collection encoded by a model."""
    from quiver.eval.bench.index_data import VectorFolder, encode_collection

    if model is None:
        if limit_docs is not None or cache[0] is not None:
            raise InputError("--limit-docs and --cache need --model, which encodes a collection")
        return VectorFolder(data)
    return encode_collection(data, model, split, out, cache=vector_cache(*cache), limit_docs=limit_docs, progress=progress)


def _systems(
    folder: VectorFolder, engines: Sequence[str], efforts: Sequence[str], shares: Sequence[float], baselines: Sequence[str] | None
) -> list[System]:
    """The systems to measure, each once."""
    from quiver.eval.bench.index_backends import baseline_systems, default_baselines, quiver_points, quiver_system, with_filters
    from quiver.retrieval.index.engines import check_engine

    points = quiver_points(efforts)
    for text in engines:
        check_engine(text, folder.card)
    systems = [with_filters(quiver_system(text, points), shares, len(folder)) for text in engines]
    for text in default_baselines(folder.kind) if baselines is None else baselines:
        systems += baseline_systems(text, kind=folder.kind, documents=len(folder), dim=folder.dim)
    return list({system.name: system for system in systems}.values())
