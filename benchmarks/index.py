"""Indexes: recall against exact search, latency, size and build cost, beside other libraries on the same vectors.

Every index is built in a process of its own. Then all are opened, each in a process of its own that may use as many CPUs as it has threads,
and searched in turns. A system that fails is noted, and the others continue. Finished builds are not repeated by the same command.

DATA is a BEIR folder, which ``--model`` encodes, or a folder of vectors:

    documents.npy      vectors of all documents, one document after another, (T, d) float32, compared by inner product
    lengths.npy        vectors per document, (P,); missing if there is one per document
    token_ids.npy      vocabulary id of each vector's token, (T,); optional
    queries.npy        vectors of all queries, (S, d) float32; query_lengths.npy as lengths.npy
    ids.txt, query_ids.txt, qrels.tsv    ids, one per line, and judgements in BEIR's layout; optional
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.environment import resident
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_lines, write_text
from quiver.eval.metrics import score
from quiver.retrieval.data.corpus import load_collection, read_qrels
from quiver.retrieval.index.build import build_index
from quiver.retrieval.index.engines import check_engine, format_settings, parse_effort, parse_engine
from quiver.retrieval.index.index import open_index
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.index.pieces import BuildOptions
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import DenseEncoding, Document, MatrixRows, ModelCard, TextTokens, TokenEncoding

import harness
from harness import MEBIBYTE, OWN, VARIANT, Column, Results, Row, Worker, WorkerError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
TIME_LIMIT = 7200  # seconds of one build or one pass over the queries
PLACE = "place"
"""Field that filters test: the document's position in a fixed random order."""


# Vectors.


@dataclass(frozen=True)
class Vectors:
    """A folder of vectors, optionally extended to ``synthetic`` documents by copies with noise of 0.3 of a vector's norm, which is kept.

    Documents are read in blocks instead of being mapped, so that they do not count as memory of the process afterwards.
    """

    path: Path
    limit_queries: int
    synthetic: int | None = None
    seed: int = 0

    @cached_property
    def real(self) -> NDArray[np.int64]:
        lengths = self.path / "lengths.npy"
        return np.load(lengths).astype(np.int64) if lengths.is_file() else np.ones(len(self.matrix), np.int64)

    @cached_property
    def matrix(self) -> NDArray[np.float32]:
        if not (self.path / "documents.npy").is_file():
            raise InputError(f"{self.path}: contains no documents.npy; to encode a collection of texts, add --model")
        return np.load(self.path / "documents.npy", mmap_mode="r", allow_pickle=False)

    @cached_property
    def kind(self) -> str:
        return "colbert" if (self.path / "lengths.npy").is_file() else "dense"

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        return self.real if self.synthetic is None else np.resize(self.real, self.synthetic)

    @property
    def card(self) -> ModelCard:
        return ModelCard(str(self.path), self.kind, "0" * 64, self.matrix.shape[1], "dot" if self.kind == "dense" else "maxsim", 0, 0)

    @cached_property
    def ids(self) -> list[str]:
        real = read_ids(self.path / "ids.txt", len(self.real))
        return real if self.synthetic is None else [f"{real[row % len(real)]} copy {row // len(real)}" for row in range(self.synthetic)]

    @cached_property
    def queries(self) -> list[NDArray[np.float32]]:
        """Queries: (d,) each for one vector per query, otherwise (T_i, d)."""
        matrix = np.load(self.path / "queries.npy", allow_pickle=False)
        if self.kind == "dense":
            return list(matrix[: self.limit_queries])
        return np.split(matrix, np.cumsum(np.load(self.path / "query_lengths.npy"))[:-1])[: self.limit_queries]

    @cached_property
    def qrels(self) -> dict[str, dict[str, int]]:
        """Judgements of these queries on these documents; empty if there are none."""
        if self.synthetic is not None or not (self.path / "qrels.tsv").is_file():
            return {}
        documents, queries = set(self.ids), set(self.query_ids)
        found = {
            query: {document: grade for document, grade in grades.items() if document in documents}
            for query, grades in read_qrels(self.path / "qrels.tsv").items()
            if query in queries
        }
        return {query: grades for query, grades in found.items() if any(grade > 0 for grade in grades.values())}

    @cached_property
    def query_ids(self) -> list[str]:
        return read_ids(self.path / "query_ids.txt", len(np.load(self.path / "queries.npy", mmap_mode="r")))[: self.limit_queries]

    def documents(self, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.uint32] | None]:
        """Vectors of documents ``start`` to ``stop - 1``, one after another, and their token ids if the folder has any."""
        ends, parts, ids = np.concatenate([[0], np.cumsum(self.real)]), [np.zeros((0, self.matrix.shape[1]), np.float32)], []
        tokens = self.path / "token_ids.npy"
        while start < stop:
            copy, first = divmod(start, len(self.real))
            last = min(len(self.real), first + stop - start)
            vectors = read_rows(self.path / "documents.npy", int(ends[first]), int(ends[last]))
            if copy:
                drawn = [
                    np.random.default_rng([self.seed, start + row]).standard_normal((length, self.matrix.shape[1]), np.float32)
                    for row, length in enumerate(self.real[first:last])
                ]
                norms = np.linalg.norm(vectors, axis=1, keepdims=True)
                vectors = vectors + np.concatenate(drawn) * (0.3 * norms / np.sqrt(self.matrix.shape[1]))
                vectors *= norms / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            parts.append(vectors.astype(np.float32, copy=False))
            if tokens.is_file():
                ids.append(read_rows(tokens, int(ends[first]), int(ends[last])).astype(np.uint32))
            start += last - first
        return np.concatenate(parts), np.concatenate(ids) if ids else None


def read_rows(path: Path, start: int, stop: int) -> NDArray[Any]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    width = int(np.prod(array.shape[1:]))
    found = np.fromfile(path, array.dtype, (stop - start) * width, offset=array.offset + start * width * array.dtype.itemsize)
    return found.reshape(-1, *array.shape[1:])


def read_ids(path: Path, count: int) -> list[str]:
    return [line for _, line in read_lines(path)] if path.is_file() else [str(number) for number in range(count)]


def encode_collection(data: Path, model: str, split: str, out: Path, limit: int | None) -> Path:
    """Encode the documents and judged queries of a collection into a folder of vectors."""
    collection = load_collection(data, split)
    documents = [document for _, document in zip(range(limit or len(collection.documents)), collection.documents, strict=False)]
    known = {document.id for document in documents}
    qrels = {query: {key: grade for key, grade in grades.items() if key in known} for query, grades in collection.qrels.items()}
    queries = [query for query in collection.queries if any(grade > 0 for grade in qrels.get(query.id, {}).values())]
    if not queries:
        raise InputError(f"{data}: no query of split {split!r} has a relevant document among the {len(documents):,} indexed documents")
    loaded: Any = load_model(model)
    out.mkdir(parents=True, exist_ok=True)
    for name, texts, role in (
        ("", [each.content() for each in documents], "document"),
        ("query_", [each.text for each in queries], "query"),
    ):
        found = loaded.encode_texts(texts, role, progress=True).vectors
        if isinstance(loaded, ColBERT):
            np.save(out / f"{name}lengths.npy", [len(each) for each in found])
            found = np.concatenate(found)
            if role == "document":
                np.save(out / "token_ids.npy", np.concatenate([ids for text in texts for ids in loaded.document_token_ids([text])]))
        np.save(out / ("queries.npy" if name else "documents.npy"), np.asarray(found, np.float32))
    write_text(out / "ids.txt", "".join(f"{each.id}\n" for each in documents))
    write_text(out / "query_ids.txt", "".join(f"{each.id}\n" for each in queries))
    lines = [f"{query.id}\t{key}\t{grade}\n" for query in queries for key, grade in qrels[query.id].items()]
    write_text(out / "qrels.tsv", "query-id\tcorpus-id\tscore\n" + "".join(lines))
    return out


# Libraries. `build` writes an index from the vectors into a folder and returns (seconds, processor seconds, settings) without the time for
# reading the vectors. `open_index` returns (prepare, search, rows): queries in the library's form, one by one and together; a search of
# prepared queries (queries, k, point) ; and document rows or ids of a result. Only `search` is timed.


@dataclass(frozen=True)
class Point:
    """Search parameters; for Quiver an effort or ``{"preset": name}``, and the number of documents that a filter allows."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    allowed: int | None = None


@dataclass(frozen=True)
class System:
    """An index: its library, its settings, and the points at which it is searched."""

    name: str
    library: str
    settings: Mapping[str, Any]
    points: tuple[Point, ...]


class FolderModel:
    """A model that encodes documents by reading their vectors; a document's text is its row number. Reading is not part of `seconds`."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors, self.card, self.reading = vectors, vectors.card, np.zeros(2)

    def encode_texts(self, texts: Sequence[str], role: str, *, progress: bool = False) -> Any:
        started = now()
        rows = np.array([int(text) for text in texts])
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        read = [self._vectors.documents(int(run[0]), int(run[-1]) + 1) for run in runs]
        lengths = self._vectors.lengths[rows]
        tokens = TextTokens(lengths.astype(np.int32), np.zeros(len(rows), bool), np.zeros(len(rows), bool))
        found, ids = np.concatenate([part for part, _ in read]), [part for _, part in read if part is not None]
        ends = np.cumsum(lengths)[:-1]
        split = np.split(np.concatenate(ids), ends) if ids else None
        self.reading += now() - started
        return DenseEncoding(found, tokens) if self.card.kind == "dense" else TokenEncoding(np.split(found, ends), tokens, split)


def now() -> NDArray[np.float64]:
    return np.array([perf_counter(), process_time()])


def build_quiver(vectors: Vectors, system: System, out: Path, threads: int) -> Any:
    """A durable index with ids, committed to disk. No calibration: the benchmark measures recall itself."""
    engine, model = parse_engine(system.name).name, FolderModel(vectors)
    documents = [Document(key, str(row)) for row, key in enumerate(vectors.ids)]
    if any(point.allowed is not None for point in system.points):
        places = random_order(len(documents)).tolist()
        documents = [document._replace(metadata={PLACE: place}) for document, place in zip(documents, places, strict=True)]
    kept = {name: "Flat" if name == "factory" else value for name, value in system.settings.items() if name in ("bits", "factory")}
    build_index(documents[:1_000], model, out / "warm-up", options=BuildOptions(engine, kept, store_text=False, calibrate=False))
    shutil.rmtree(out / "warm-up")
    model.reading[:] = 0
    started = now()
    index = build_index(documents, model, out / "index", options=BuildOptions(engine, system.settings, store_text=False, calibrate=False))
    return *(now() - started - model.reading), {"engine": index.kind, **index.parameters}


def open_quiver(vectors: Vectors, folder: Path, threads: int) -> Any:
    """A Quiver index; with several threads the queries are divided among them, each computing alone."""
    index = open_index(folder / "index")

    def prepare(queries: Sequence[Any]) -> Any:
        return (
            ([query[None] for query in queries], np.stack(queries)) if vectors.kind == "dense" else ([[each] for each in queries], queries)
        )

    def search(queries: Any, k: int, point: Point) -> Any:
        effort = point.params.get("preset", dict(point.params))
        allowed = None if point.allowed is None else f"{PLACE}<{point.allowed}"
        if threads == 1 or len(queries) == 1:
            return [index.search(queries, k, filter=allowed, effort=effort)]
        ends = np.linspace(0, len(queries), threads + 1).astype(int).tolist()
        parts = [queries[start:stop] for start, stop in pairwise(ends) if start < stop]
        with ThreadPoolExecutor(threads, initializer=faiss.omp_set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda part: index.search(part, k, filter=allowed, effort=effort), parts))

    return prepare, search, lambda found: [list(ids) for hits in found for ids in hits.ids]


def build_faiss(vectors: Vectors, system: System, out: Path, threads: int) -> Any:
    faiss.omp_set_num_threads(threads)
    matrix = vectors.documents(0, len(vectors.lengths))[0]
    index = faiss.index_factory(vectors.matrix.shape[1], system.settings["factory"], faiss.METRIC_INNER_PRODUCT)
    started = now()
    index.train(matrix)
    index.add(matrix)
    faiss.write_index(index, str(out / "index.faiss"))
    return *(now() - started), {}


def open_faiss(vectors: Vectors, folder: Path, threads: int) -> Any:
    faiss.omp_set_num_threads(threads)
    index, space = faiss.read_index(str(folder / "index.faiss")), faiss.ParameterSpace()

    def prepare(queries: Sequence[Any]) -> Any:
        return [np.ascontiguousarray(query[None]) for query in queries], np.stack(queries)

    def search(queries: Any, k: int, point: Point) -> Any:
        space.set_index_parameters(index, ",".join(f"{name}={value}" for name, value in point.params.items()))
        return index.search(queries, k)[1]

    return prepare, search, lambda found: [[row for row in query if row >= 0] for query in found.tolist()]


def build_fast_plaid(vectors: Vectors, system: System, out: Path, threads: int) -> Any:
    """A PLAID index with the default 4 bits, without PyLate, whose index reads a file of ids in every search."""
    tensors = [torch.from_numpy(each) for each in np.split(vectors.documents(0, len(vectors.lengths))[0], np.cumsum(vectors.lengths)[:-1])]
    index = importlib.import_module("fast_plaid.search").FastPlaid(index=str(out / "plaid"), device="cpu")
    started = now()
    index.create(documents_embeddings=tensors)
    return *(now() - started), {"bits": 4}


def open_fast_plaid(vectors: Vectors, folder: Path, threads: int) -> Any:
    index = importlib.import_module("fast_plaid.search").FastPlaid(index=str(folder / "plaid"), device="cpu", low_memory=False)

    def prepare(queries: Sequence[Any]) -> Any:
        tensors = [torch.from_numpy(np.array(query)) for query in queries]
        return [[tensor] for tensor in tensors], tensors

    def search(queries: Any, k: int, point: Point) -> Any:
        return index.search(queries, top_k=k, n_processes=threads, show_progress=False, **point.params)

    return prepare, search, lambda found: [[int(row) for row, _ in hits] for hits in found]


def points(*params: Mapping[str, Any]) -> tuple[Point, ...]:
    """The library's defaults and changes to them; each point sets every parameter, because libraries keep earlier values."""
    return tuple(Point(format_settings(each), {**params[0], **each}) for each in params)


LIBRARIES = {  # module -> build, open
    OWN: (build_quiver, open_quiver),
    "faiss": (build_faiss, open_faiss),
    "fast_plaid": (build_fast_plaid, open_fast_plaid),
}


def quiver_system(text: str, efforts: Sequence[str], shares: Sequence[float], documents: int) -> System:
    """A Quiver system of an engine such as ``ivf-tokens:bits=3``, searched with every effort, without and with filters."""
    engine, chosen = parse_engine(text), []
    for each in ["exact"] if engine.name.startswith("exact") else dict.fromkeys(efforts):
        effort = parse_effort(each)
        chosen.append(Point(each, {"preset": effort} if isinstance(effort, str) else effort))
    for share in shares:
        if not 0 < share < 1:
            raise InputError(f"--filter-share must be > 0 and < 1, got {share:g}")
        allowed = max(1, round(share * documents))
        chosen += [replace(each, name=f"{each.name}, {share:.0%} allowed", allowed=allowed) for each in chosen if each.allowed is None]
    return System(text, OWN, engine.settings, tuple(chosen))


def baseline_systems(vectors: Vectors, names: Sequence[str] | None) -> list[System]:
    """The named systems of other libraries, or all for this kind of vectors. FAISS's are exact, a graph, and IVF with refined codes."""
    if vectors.kind == "colbert":
        # By default PyLate computes full scores of 8,192 documents and fast-plaid of 4,096; far fewer are faster.
        counts = points({"n_ivf_probe": 8, "n_full_scores": 4096}, {"n_full_scores": 256}, {"n_ivf_probe": 32, "n_full_scores": 8192})
        systems = {"fast-plaid": System("fast-plaid", "fast_plaid", {}, counts)}
    else:
        lists = 2 ** max(0, round(math.log2(4 * math.sqrt(len(vectors.lengths)))))
        probes = points({"nprobe": 1, "k_factor_rf": 1}, {"nprobe": 8, "k_factor_rf": 10}, {"nprobe": 32, "k_factor_rf": 10})
        factories = {
            "Flat": (Point("default"),),
            "HNSW32": points({"efSearch": 16}, {"efSearch": 64}, {"efSearch": 256}),
            f"IVF{lists},PQ{vectors.matrix.shape[1] // 2}x4fs,RFlat": probes,
        }
        systems = {f"faiss:{name}": System(f"faiss:{name}", "faiss", {"factory": name}, each) for name, each in factories.items()}
    for name in names or ():
        if name not in systems:
            raise InputError(f"unknown baseline {name!r} for {vectors.kind} vectors; choose from {', '.join(systems)}")
    return [system for name, system in systems.items() if names is None or name in names]


# Exact search and measures.


def random_order(documents: int) -> NDArray[np.int64]:
    """Each document's position in a fixed random order; those below n are a random sample of n."""
    return np.random.default_rng(documents).permutation(documents)


def exact_hits(vectors: Vectors, depth: int, allowed: int | None) -> list[tuple[list[int], NDArray[np.float32]]]:
    """Rows and scores of exact search in float32 per query; twice the depth, to see ties at the depth."""
    keep = np.ones(len(vectors.lengths), bool) if allowed is None else random_order(len(vectors.lengths)) < allowed
    numbers, lengths = np.flatnonzero(keep), vectors.lengths[keep]
    rows = MatrixRows(vectors.matrix if allowed is None else vectors.matrix[np.repeat(keep, vectors.lengths)])
    given: Any = np.stack(vectors.queries) if vectors.kind == "dense" else vectors.queries
    names = [str(number) for number in numbers]
    hits = index_vectors(names, rows, vectors.card, lengths=None if vectors.kind == "dense" else lengths).search(given, 2 * depth)
    return [([int(key) for key in ids], scores) for ids, scores in zip(hits.ids, hits.scores, strict=True)]


def recall(found: Sequence[Sequence[int]], exact: Sequence[tuple[list[int], NDArray[np.float32]]], k: int) -> float:
    """Share of the k best documents among the first k found; a document that ties with the k-th best counts as well."""
    shares = []
    for rows, (best, scores) in zip(found, exact, strict=True):
        wanted = min(k, len(best))
        lowest = float(scores[wanted - 1])
        right = {row for row, each in zip(best, scores, strict=True) if each >= lowest - 1e-6 * max(1.0, abs(lowest))}
        shares.append(min(wanted, len(right.intersection(rows[:k]))) / wanted)
    return float(np.mean(shares))


def ndcg(found: Sequence[Sequence[int]], vectors: Vectors) -> float:
    run = {
        query: {vectors.ids[row]: -float(place) for place, row in enumerate(rows[:10])}
        for query, rows in zip(vectors.query_ids, found, strict=True)
    }
    return score(vectors.qrels, run, ["ndcg@10"]).means["ndcg@10"]


# Measuring.


def open_system(vectors: Vectors, system: System, folder: Path, threads: int, *, build: bool) -> Callable[[Any], Any]:
    """In a worker: build an index, or open it and answer ``(how, point, k)``; ``how`` is one, all or memory."""
    torch.set_num_threads(threads)
    importlib.import_module(system.library)
    builder, opener = LIBRARIES[system.library]
    if build:
        return lambda request: build_here(builder, vectors, system, folder, threads)
    queries, before = vectors.queries, {name: resident(name) for name in ("RssAnon", "RssFile")}
    started = perf_counter()
    prepare, search, rows = opener(vectors, folder, threads)
    seconds = perf_counter() - started
    single, together = prepare(queries)

    def reply(request: tuple[str, int, int]) -> Any:
        how, place, k = request
        point = system.points[place] if how != "memory" else None
        if how == "memory":
            taken = {name: max(0, resident(name) - value) for name, value in before.items()}
            return {"open_seconds": seconds, "private": taken["RssAnon"], "mapped": taken["RssFile"]}
        if how == "all":
            begun = perf_counter()
            search(together, k, point)
            return perf_counter() - begun
        milliseconds, found = [], []
        for query in single:
            begun = perf_counter()
            hits = search(query, k, point)
            milliseconds.append(1000 * (perf_counter() - begun))
            found += rows(hits)
        return milliseconds, found

    return reply


def build_here(build: Any, vectors: Vectors, system: System, folder: Path, threads: int) -> dict[str, Any]:
    folder.mkdir(parents=True)
    harness.reset_peak()
    before = resident("VmRSS")
    seconds, processor, settings = build(vectors, system, folder, threads)
    disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    chosen = format_settings({**system.settings, **settings})
    return {"build_seconds": seconds, "build_processor": processor, "peak": resident("VmHWM") - before, "disk": disk, "settings": chosen}


def bench_index(results: Results, vectors: Vectors, systems: Sequence[System], options: Mapping[str, Any], work: Path) -> None:
    """Build and search indexes of the same vectors: cases ``build`` and ``search``."""
    built: dict[str, Row] = {row["backend"]: row for row in results.cases.get("build", {}).get("rows", [])}
    alive = []
    for system in systems:
        folder = work / re.sub(r"\W", "-", system.name)
        if importlib.util.find_spec(system.library) is None:
            results.notes.append(f"{system.name}: {system.library} is not installed")
            continue
        if system.name not in built or not folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                with start(vectors, system, folder, options, options["threads"], build=True) as worker:
                    built[system.name] = {"backend": system.name, **worker.ask("build")}
            except WorkerError as error:
                results.notes.append(f"{system.name}: {error}")
                continue
        alive.append((system, folder))
        add_builds(results, vectors, list(built.values()))
    if not alive:
        raise InputError("nothing could be measured: " + "; ".join(results.notes))
    exact: dict[int | None, Any] = {}
    if vectors.synthetic is None:
        for allowed in dict.fromkeys([None, *(point.allowed for system, _ in alive for point in system.points)]):
            exact[allowed] = exact_hits(vectors, 100, allowed)
    rows = search_systems(results, vectors, alive, exact, options)
    for system, _ in alive:
        built[system.name] |= next((row.pop("memory") for row in rows if row["backend"] == system.name and "memory" in row), {})
    add_builds(results, vectors, list(built.values()))
    reference = ""
    if exact and vectors.qrels:
        best = ndcg([found for found, _ in exact[None]], vectors)
        reference = f"nDCG@10 of exact search: {best:.4f} over {len(vectors.qrels):,} queries."
    sizes = f"{len(vectors.lengths):,} documents, {int(vectors.lengths.sum()):,} vectors, {len(vectors.queries):,} queries"
    results.add("search", f"Search: {sizes}", search_columns(options), rows, reference)


def start(vectors: Vectors, system: System, folder: Path, options: Mapping[str, Any], threads: int, *, build: bool) -> Worker:
    """A worker for a system; Quiver's searches run on several Python threads, each of which computes with one thread."""
    arguments = {"vectors": vectors, "system": system, "folder": folder, "threads": threads, "build": build}
    environment = dict.fromkeys(THREADS, str(1 if system.library == OWN and not build else threads))
    return Worker(open_system, arguments, threads=threads, environment=environment, timeout=options["timeout"])


def search_systems(
    results: Results, vectors: Vectors, alive: Sequence[Any], exact: Mapping[Any, Any], options: Mapping[str, Any]
) -> list[Row]:
    """Search all systems in turns; one row per system and point. A system that fails is searched no further."""
    rows: dict[tuple[str, int], Row] = {}
    for threads in sorted({1, options["threads"]}):
        tasks = [("first", 1), ("one", options["rounds"]), ("memory", 1)] if threads == 1 else []
        with ExitStack() as stack:
            workers: dict[str, Worker | None] = {}
            for how, rounds in [*tasks, (f"queries_per_second_{threads}", options["rounds"])]:
                turns = [(system, folder, place) for system, folder in alive for place in range(len(system.points))]
                for _, (system, folder, place) in harness.interleave(turns, rounds):
                    row = rows.setdefault((system.name, place), {"backend": system.name, "variant": system.points[place].name})
                    try:
                        if system.name not in workers:
                            workers[system.name] = None  # in case it cannot be opened
                            opened = start(vectors, system, folder, options, threads, build=False)
                            workers[system.name] = stack.enter_context(opened)
                        if (worker := workers[system.name]) is not None:
                            row |= measure_search(worker, row, vectors, exact, options["k"], system, place, how)
                    except WorkerError as error:
                        workers[system.name] = None
                        results.notes.append(f"{system.name}, {system.points[place].name}: {error}")
    return [row for row in rows.values() if "p50" in row]


def measure_search(worker: Worker, row: Row, vectors: Vectors, exact: Any, k: int, system: System, place: int, how: str) -> Row:
    """Search once and return what was measured, as quantities of the row of this system and point."""
    if how == "memory":
        return {"memory": worker.ask((how, place, k))} if place == 0 else {}
    if how.startswith("queries_per_second"):
        return {how: [*row.get(how, []), len(vectors.queries) / worker.ask(("all", place, k))]}
    if how == "one":
        milliseconds, _ = worker.ask((how, place, k))
        return {f"p{share}": [*row.get(f"p{share}", []), float(np.percentile(milliseconds, share))] for share in (50, 95, 99)}
    measured: Row = {}
    number = {key: position for position, key in enumerate(vectors.ids)}
    for depth in (100, k):  # the first pass checks the results
        _, found = worker.ask(("one", place, depth))
        rows = [[number.get(each, -1) if isinstance(each, str) else each for each in hits] for hits in found]
        if any(not 0 <= each < len(number) for hits in rows for each in hits) or any(len(set(hits)) < len(hits) for hits in rows):
            raise WorkerError("returned an unknown document, or one twice")
        allowed = system.points[place].allowed
        if exact:
            measured |= {f"recall@{each}": recall(rows, exact[allowed], each) for each in ((100,) if depth == 100 else (1, k))}
            if depth == k and vectors.qrels and allowed is None:
                measured["ndcg"] = ndcg(rows, vectors)
    return measured


def search_columns(options: Mapping[str, Any]) -> list[Column]:
    depths = [Column(f"recall@{depth}", f"recall@{depth}", ".4f") for depth in dict.fromkeys((1, options["k"], 100))]
    counts = [
        Column(f"queries/s, {count} thread{'s' * (count != 1)}", f"queries_per_second_{count}") for count in sorted({1, options["threads"]})
    ]
    times = [Column("p50 ms", "p50", ".3g", spread=True), Column("p95", "p95", ".3g"), Column("p99", "p99", ".3g")]
    return [Column("system", "backend"), VARIANT, *depths, Column("nDCG@10", "ndcg", ".4f"), *times, *counts]


def add_builds(results: Results, vectors: Vectors, rows: Sequence[Row]) -> None:
    unit, count = ("token", int(vectors.lengths.sum())) if vectors.kind == "colbert" else ("document", len(vectors.lengths))
    columns = [
        Column("system", "backend"),
        Column("settings", "settings"),
        Column(f"bytes/{unit}", "disk", ".1f", scale=1 / count),
        Column("build s", "build_seconds", ",.2f"),
        Column("build CPU s", "build_processor", ",.2f"),
        Column("build peak MiB", "peak", scale=1 / MEBIBYTE),
        Column("open s", "open_seconds", ".2f"),
        Column("private MiB", "private", scale=1 / MEBIBYTE),
        Column("mapped MiB", "mapped", scale=1 / MEBIBYTE),
    ]
    note = "A build ends when the index is on disk; encoding and reading the vectors are not timed. Peaks are beyond the loaded libraries."
    results.add("build", "Build, disk and memory", columns, rows, note)


def main() -> None:
    parser = harness.parser(__doc__, "python benchmarks/index.py data/scifact --model MODEL --engine auto --engine exact", rounds=3)
    parser.add_argument("data", type=Path, help="BEIR folder, or folder of vectors.")
    parser.add_argument("--model", "-m", help="Folder or hub id of a bi-encoder or a ColBERT model that encodes a BEIR folder.")
    parser.add_argument("--split", default="test", help="Split of the judgements (default: %(default)s).")
    parser.add_argument("--limit-docs", type=int, help="Use only the first documents, and the queries about them.")
    parser.add_argument("--limit-queries", type=int, default=200, help="Use only the first queries (default: %(default)s).")
    parser.add_argument("--synthetic", type=int, help="Documents to index, noisy copies beyond the existing ones; for latency and size.")
    parser.add_argument("--engine", action="append", help="Engine such as auto, exact or ivf-tokens:bits=3. Repeatable.")
    parser.add_argument("--effort", action="append", help="Search effort such as balanced or nprobe=8. Repeatable.")
    parser.add_argument("--filter-share", action="append", type=float, help="Also search with a filter of this share. Repeatable.")
    parser.add_argument("--baseline", action="append", help="System of FAISS or fast-plaid (default: all, faiss:Flat...). Repeatable.")
    parser.add_argument("--no-baselines", action="store_true", help="Measure Quiver alone.")
    parser.add_argument("-k", type=int, default=10, help="Results per query (default: %(default)s).")
    given = parser.parse_args()
    options = {"k": given.k, "rounds": given.rounds, "threads": given.threads or 1, "timeout": TIME_LIMIT}
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        work = Path(temporary) if given.out is None else given.out / "work"
        path = given.data if given.model is None else work / "vectors"
        if given.model is not None and not (path / "qrels.tsv").is_file():
            encode_collection(given.data, given.model, given.split, path, given.limit_docs)
        vectors = Vectors(path, given.limit_queries, given.synthetic, given.seed)
        engines, efforts, shares = given.engine or ["auto", "exact"], given.effort or ["balanced"], given.filter_share or []
        for text in engines:
            check_engine(text, vectors.card)
        systems = [quiver_system(text, efforts, shares, len(vectors.lengths)) for text in engines]
        systems += baseline_systems(vectors, [] if given.no_baselines else given.baseline)
        name, synthetic = given.data.resolve().name, given.synthetic
        settings = {**options, "data": name, "model": given.model, "queries": len(vectors.queries), "synthetic": synthetic}
        results = Results(f"Indexes: {name}", settings, given.out, overwrite=given.overwrite)
        bench_index(results, vectors, list({system.name: system for system in systems}.values()), options, work)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    harness.run_script(main)
