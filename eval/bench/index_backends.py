"""Backends of the index benchmark: Quiver's engines, FAISS, hnswlib, usearch, fast-plaid, and PyLate's WARP and Voyager indexes.

A system is an index with its settings. It is built once and searched with one or more sets of search parameters, which give a curve of
recall over latency. Every library gets the same float32 vectors and returns document rows. Before timing, the vectors are converted to the
form in which users of the library hold them: for Quiver a model that reads the folder, for PLAID a list of tensors.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol, TypeAlias

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.eval.bench.index_data import Kind, VectorFolder, random_order, text_sha256
from quiver.eval.bench.results import OWN
from quiver.retrieval.index.build import build_index
from quiver.retrieval.index.documents import Condition, Filter
from quiver.retrieval.index.engines import Setting, format_settings, parse_effort, parse_engine
from quiver.retrieval.index.index import Index, open_index
from quiver.retrieval.index.pieces import BuildOptions
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, Role, TextTokens, TokenEncoding

SearchParams: TypeAlias = Mapping[str, Setting]

# FAISS's type stubs lack the functions that its Python layer adds.
_faiss: Any = faiss

# Number of documents in the index that is built before timing, to compile kernels.
_WARM_UP = 1_000
# Field that filters test: the document's position in the random order.
_PLACE = "place"


@dataclass(frozen=True)
class Point:
    """Search parameters of a system.

    Attributes:
        name: Name in tables.
        params: Search parameters of the library; for Quiver, ``preset`` alone selects a preset.
        allowed: Number of randomly chosen documents that the filter matches; None for no filter. For Quiver only.
    """

    name: str
    params: SearchParams = field(default_factory=dict)
    allowed: int | None = None


@dataclass(frozen=True)
class System:
    """An index and its search parameters.

    Attributes:
        name: Name in tables and on the command line.
        library: A key of `LIBRARIES`.
        settings: Settings for building.
        points: Sets of search parameters.
    """

    name: str
    library: str
    settings: Mapping[str, Setting]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Built:
    """Cost of a build, without the time for reading the vectors.

    Attributes:
        seconds: Wall-clock time.
        processor_seconds: Processor time of all threads.
        settings: Settings of the index, given or chosen.
    """

    seconds: float
    processor_seconds: float
    settings: Mapping[str, Setting]


class OpenIndex(Protocol):
    """An index that can be searched."""

    def prepare(self, queries: Sequence[NDArray[np.float32]]) -> tuple[list[Any], Any]:
        """Convert the queries to the library's form, one by one and all together; not timed."""

    def search(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search with one prepared query, or with all of them."""

    def rows(self, found: Any) -> Sequence[Sequence[int | str]]:
        """Document rows or ids from the result of a search, best first; not timed."""


Build: TypeAlias = Callable[[VectorFolder, System, Path, int], Built]
"""Builds an index: (vectors, system, empty folder, number of threads) -> cost."""

Open: TypeAlias = Callable[[VectorFolder, System, Path, int], OpenIndex]
"""Opens an index for searching: (vectors, system, folder, number of threads) -> index."""


class Clock:
    """Measures wall-clock and processor time from its creation."""

    def __init__(self) -> None:
        self._started: tuple[float, ...] = _now()

    def exclude(self, other: Clock) -> None:
        """Exclude the time since another clock was created."""
        self._started = tuple(mine + now - then for mine, now, then in zip(self._started, _now(), other._started, strict=True))

    def built(self, settings: Mapping[str, Setting]) -> Built:
        """Return the measured time."""
        seconds, processor = (now - then for now, then in zip(_now(), self._started, strict=True))
        return Built(seconds, processor, dict(settings))


def _now() -> tuple[float, float]:
    return perf_counter(), process_time()


class _FolderModel:
    """A model that encodes documents by reading their vectors from a folder; the text of a document is its row number.

    Attributes:
        clock: Clock from which the time for reading is excluded, as if the documents had been encoded before; None for no clock.
    """

    def __init__(self, vectors: VectorFolder) -> None:
        self._vectors = vectors
        self.clock: Clock | None = None
        path, dense = str(vectors.path), vectors.kind == "dense"
        self.card = ModelCard(path, vectors.kind, text_sha256(path), vectors.dim, "dot" if dense else "maxsim", 0, 0)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        del role, progress
        reading = Clock()
        rows = np.array([int(text) for text in texts])
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        read = [self._vectors.documents(int(run[0]), int(run[-1]) + 1) for run in runs]
        lengths = self._vectors.lengths[rows]
        tokens = TextTokens(lengths.astype(np.int32), np.zeros(len(rows), bool), np.zeros(len(rows), bool))
        vectors, ids = np.concatenate([part for part, _ in read]), [part for _, part in read if part is not None]
        ends = np.cumsum(lengths)[:-1]
        split_ids = np.split(np.concatenate(ids), ends) if ids else None
        if self.clock is not None:
            self.clock.exclude(reading)
        return DenseEncoding(vectors, tokens) if self.card.kind == "dense" else TokenEncoding(np.split(vectors, ends), tokens, split_ids)


def _build_quiver(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """Build a Quiver index as its users do: durable, with ids, committed to disk."""
    del threads
    engine = parse_engine(system.name).name
    model = _FolderModel(vectors)
    # No calibration: the benchmark measures recall itself.
    options = BuildOptions(engine=engine, settings=system.settings, store_text=False, calibrate=False)
    documents = [Document(key, str(row)) for row, key in enumerate(vectors.ids)]
    if any(point.allowed is not None for point in system.points):
        places = random_order(len(documents)).tolist()
        documents = [document._replace(metadata={_PLACE: position}) for document, position in zip(documents, places, strict=True)]
    warm_up = BuildOptions(engine, warm_up_settings(system.settings), store_text=False, calibrate=False)
    build_index(documents[:_WARM_UP], model, out / "warm-up", options=warm_up)
    shutil.rmtree(out / "warm-up")
    model.clock = clock = Clock()
    index = build_index(documents, model, out / "index", options=options)
    return clock.built({"engine": index.kind, **index.parameters})


def warm_up_settings(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return settings suitable for the few documents of a warm-up: without a number of lists, and FAISS's simplest index.

    Example:
        >>> warm_up_settings({"bits": 16, "factory": "IVF4096,Flat"}), warm_up_settings({"nlist": 4096})
        ({'bits': 16, 'factory': 'Flat'}, {})
    """
    return {name: "Flat" if name == "factory" else value for name, value in settings.items() if name in ("bits", "factory")}


class _QuiverIndex:
    """A Quiver index."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del system, threads
        self._index: Index = open_index(folder / "index")
        self._dense = vectors.kind == "dense"

    def prepare(self, queries: Sequence[NDArray[np.float32]]) -> tuple[list[Any], Any]:
        if self._dense:
            return [query[None] for query in queries], np.stack(queries)
        return [[query] for query in queries], list(queries)

    def search(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        effort: Any = point.params.get("preset", point.params)
        allowed = None if point.allowed is None else Filter((Condition(_PLACE, "<", (point.allowed,)),))
        if threads == 1:
            return [self._index.search(queries, k, filter=allowed, effort=effort)]
        ends = np.linspace(0, len(queries), threads + 1).astype(int)
        parts = [queries[start:stop] for start, stop in pairwise(ends.tolist()) if start < stop]
        # OpenMP's number of threads is per calling thread; each of these threads computes alone.
        with ThreadPoolExecutor(threads, initializer=_faiss.omp_set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda part: self._index.search(part, k, filter=allowed, effort=effort), parts))

    def rows(self, found: Any) -> list[list[int | str]]:
        # Return ids; the parent maps them to rows, so that the mapping does not count as memory of the index.
        return [list(ids) for hits in found for ids in hits.ids]


def _build_faiss(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """Build a FAISS index from its factory string."""
    _faiss.omp_set_num_threads(threads)
    matrix, clock = _matrix(vectors), Clock()
    index = _faiss.index_factory(vectors.dim, system.settings["factory"], _faiss.METRIC_INNER_PRODUCT)
    index.train(matrix)
    index.add(matrix)
    _faiss.write_index(index, str(out / "index.faiss"))
    return clock.built({})


class _MatrixQueries:
    """Queries are matrix rows; results are labels, of which negative ones mean missing hits."""

    def prepare(self, queries: Sequence[NDArray[np.float32]]) -> tuple[list[Any], Any]:
        return [np.ascontiguousarray(query[None]) for query in queries], np.stack(queries)

    def rows(self, found: Any) -> list[list[int]]:
        return [[row for row in query if row >= 0] for query in found.astype(np.int64).tolist()]


class _FaissIndex(_MatrixQueries):
    """A FAISS index, which searches on its own threads."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del vectors, system
        _faiss.omp_set_num_threads(threads)
        self._index = _faiss.read_index(str(folder / "index.faiss"))
        self._set: SearchParams = {}

    def search(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        del threads
        if point.params != self._set:
            text = ",".join(f"{name}={value}" for name, value in point.params.items())
            _faiss.ParameterSpace().set_index_parameters(self._index, text)
            self._set = point.params
        return self._index.search(queries, k)[1]


def _build_hnswlib(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """Build an hnswlib graph with the settings of its documentation."""
    del system
    hnswlib = importlib.import_module("hnswlib")
    matrix, clock = _matrix(vectors), Clock()
    index = hnswlib.Index(space="ip", dim=vectors.dim)
    index.init_index(max_elements=len(matrix), ef_construction=200, M=16)
    index.add_items(matrix, num_threads=threads)
    index.save_index(str(out / "index.hnswlib"))
    return clock.built({"M": 16, "ef_construction": 200})


class _HnswlibIndex(_MatrixQueries):
    """An hnswlib graph."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del system, threads
        self._index = importlib.import_module("hnswlib").Index(space="ip", dim=vectors.dim)
        self._index.load_index(str(folder / "index.hnswlib"))
        self._documents = len(vectors)

    def search(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        # hnswlib requires ef >= k and at least k documents.
        depth = min(k, self._documents)
        self._index.set_ef(max(int(point.params["ef"] or 0), depth))
        return self._index.knn_query(queries, k=depth, num_threads=threads)[0]


def _build_usearch(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """Build a usearch graph with its default settings, in float32."""
    del system
    index_class = importlib.import_module("usearch.index").Index
    matrix, clock = _matrix(vectors), Clock()
    index = index_class(ndim=vectors.dim, metric="ip", dtype="f32")
    index.add(np.arange(len(matrix)), matrix, threads=threads)
    index.save(str(out / "index.usearch"))
    return clock.built({"connectivity": int(index.connectivity), "expansion_add": int(index.expansion_add)})


class _UsearchIndex(_MatrixQueries):
    """A usearch graph."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del system, threads
        self._index = importlib.import_module("usearch.index").Index(ndim=vectors.dim, metric="ip", dtype="f32")
        self._index.load(str(folder / "index.usearch"))
        self._documents = len(vectors)

    def search(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        self._index.expansion_search = point.params["expansion_search"]
        return self._index.search(queries, min(k, self._documents), threads=threads)

    def rows(self, found: Any) -> list[list[int]]:
        # Results of several queries include a count per query.
        keys = found.keys.astype(np.int64)
        if keys.ndim == 1:
            return [keys.tolist()]
        return [row[: int(count)].tolist() for row, count in zip(keys, found.counts, strict=True)]


class _TensorQueries:
    """Queries are tensors; a hit is a pair or a mapping."""

    def prepare(self, queries: Sequence[NDArray[np.float32]]) -> tuple[list[Any], Any]:
        torch = importlib.import_module("torch")
        tensors = [torch.from_numpy(np.array(query)) for query in queries]
        return [[tensor] for tensor in tensors], tensors

    def rows(self, found: Any) -> list[list[int]]:
        return [[int(hit["id"] if isinstance(hit, dict) else hit[0]) for hit in hits] for hits in found]


def _build_fast_plaid(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """Build a PLAID index with the default 4 bits, without PyLate, whose index reads a file of ids in every search."""
    del system, threads
    index_class = importlib.import_module("fast_plaid.search").FastPlaid
    tensors, clock = _tensors(vectors), Clock()
    index_class(index=str(out / "plaid"), device="cpu").create(documents_embeddings=tensors)
    return clock.built({"bits": 4})


class _FastPlaidIndex(_TensorQueries):
    """A PLAID index in memory, as PyLate opens it."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del vectors, system, threads
        self._index = importlib.import_module("fast_plaid.search").FastPlaid(index=str(folder / "plaid"), device="cpu", low_memory=False)

    def search(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        return self._index.search(
            queries,
            top_k=k,
            n_full_scores=point.params["n_full_scores"],
            n_ivf_probe=point.params["n_ivf_probe"],
            n_processes=threads,
            show_progress=False,
        )


def _build_warp(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """Build a WARP index as PyLate does, with the default 4 bits."""
    del system
    tensors, clock = _tensors(vectors), Clock()
    _open_warp(out, threads).add_documents(documents_ids=_row_names(vectors), documents_embeddings=tensors)
    return clock.built({"bits": 4})


class _WarpIndex(_TensorQueries):
    """A WARP index as PyLate opens it."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del vectors, system
        self._index = _open_warp(folder, threads)

    def search(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        del threads
        self._index.n_ivf_probe = point.params["n_ivf_probe"]
        return self._index(queries, k=k)


def _build_voyager(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """Build an HNSW graph of all token vectors as PyLate does."""
    del system, threads
    documents, clock = _split(vectors), Clock()
    index = _open_voyager(out, vectors.dim)
    index.add_documents(documents_ids=_row_names(vectors), documents_embeddings=documents)
    return clock.built({"M": 64, "ef_construction": 200})


class _VoyagerIndex(_TensorQueries):
    """An HNSW graph of token vectors with PyLate's retriever, which computes full scores of the tokens' candidates."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del system, threads
        self._index = _open_voyager(folder, vectors.dim)
        self._retriever = importlib.import_module("pylate.retrieve").ColBERT(index=self._index)

    def search(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        del threads
        self._index.ef_search = point.params["ef_search"]
        return self._retriever.retrieve(queries_embeddings=queries, k=k, k_token=point.params["k_token"], device="cpu")


def _open_warp(folder: Path, threads: int) -> Any:
    index_class = importlib.import_module("pylate.indexes").WARP
    return index_class(index_folder=str(folder), index_name="warp", device="cpu", num_threads=threads, show_progress=False)


def _open_voyager(folder: Path, dim: int) -> Any:
    return importlib.import_module("pylate.indexes").Voyager(index_folder=str(folder), index_name="voyager", embedding_size=dim)


def _matrix(vectors: VectorFolder) -> NDArray[np.float32]:
    return vectors.documents(0, len(vectors))[0]


def _row_names(vectors: VectorFolder) -> list[str]:
    return [str(row) for row in range(len(vectors))]


def _split(vectors: VectorFolder) -> list[NDArray[np.float32]]:
    return np.split(_matrix(vectors), np.cumsum(vectors.lengths)[:-1])


def _tensors(vectors: VectorFolder) -> list[Any]:
    torch = importlib.import_module("torch")
    return [torch.from_numpy(np.ascontiguousarray(document)) for document in _split(vectors)]


@dataclass(frozen=True)
class Library:
    """A library of indexes.

    Attributes:
        kinds: Supported kinds of vectors.
        build: Builds an index.
        open: Opens an index.
        modules: Modules that must be installed.
        install: Arguments of ``pip install`` for these modules.
        imports: Modules to import before timing.
        packages: Distributions whose versions are recorded.
        points: Search parameters, if they do not depend on the settings.
    """

    kinds: tuple[Kind, ...]
    build: Build
    open: Open
    modules: tuple[str, ...]
    install: str
    imports: tuple[str, ...]
    packages: tuple[str, ...]
    points: tuple[Point, ...] = ()


def _points(default: SearchParams, *changes: SearchParams) -> tuple[Point, ...]:
    """The library's defaults and changes to them; each point sets every parameter, because libraries keep earlier values."""
    return (Point("default", default), *(Point(format_settings(each), {**default, **each}) for each in changes))


LIBRARIES: Mapping[str, Library] = {
    OWN: Library(("dense", "colbert"), _build_quiver, _QuiverIndex, (), "quiver-retrieval", (), ("quiver-retrieval", "faiss-cpu", "numba")),
    "faiss": Library(("dense",), _build_faiss, _FaissIndex, ("faiss",), "faiss-cpu", ("faiss",), ("faiss-cpu",)),
    "hnswlib": Library(
        ("dense",),
        _build_hnswlib,
        _HnswlibIndex,
        ("hnswlib",),
        "hnswlib",
        ("hnswlib",),
        ("hnswlib",),
        _points({"ef": 10}, {"ef": 64}, {"ef": 256}),
    ),
    "usearch": Library(
        ("dense",),
        _build_usearch,
        _UsearchIndex,
        ("usearch",),
        "usearch",
        ("usearch.index",),
        ("usearch",),
        _points({"expansion_search": 64}, {"expansion_search": 256}),
    ),
    "fast-plaid": Library(
        ("colbert",),
        _build_fast_plaid,
        _FastPlaidIndex,
        ("fast_plaid",),
        "fast-plaid",
        ("fast_plaid.search",),
        ("fast-plaid", "torch"),
        # By default PyLate computes full scores of 8,192 documents and fast-plaid of 4,096; far fewer are faster.
        _points({"n_ivf_probe": 8, "n_full_scores": 4096}, {"n_full_scores": 256}, {"n_ivf_probe": 32, "n_full_scores": 8192}),
    ),
    "warp": Library(
        ("colbert",),
        _build_warp,
        _WarpIndex,
        ("xtr_warp", "pylate"),
        "'pylate[warp]'",
        ("pylate.indexes",),
        ("xtr-warp-rs", "pylate", "torch"),
        _points({"n_ivf_probe": 32}, {"n_ivf_probe": 128}),
    ),
    "voyager": Library(
        ("colbert",),
        _build_voyager,
        _VoyagerIndex,
        ("voyager", "pylate"),
        # PyLate 1.6 passes lists of vectors, which Voyager accepts up to version 2.1.
        "'pylate[voyager]' 'voyager<2.2'",
        ("pylate.indexes", "pylate.retrieve"),
        ("voyager", "pylate", "torch"),
        _points({"ef_search": 200, "k_token": 100}, {"ef_search": 400, "k_token": 400}),
    ),
}
"""Name -> library. The first is Quiver; the others are the baselines."""

BASELINES = tuple(name for name in LIBRARIES if name != OWN)

NOT_COMPARED: Mapping[Kind, Mapping[str, str]] = {
    "dense": {},
    "colbert": {
        "colbert-ai": "compiles an extension at first use and needs a GPU to index; fast-plaid implements the same algorithm",
        "tachiom": "its wheel needs glibc 2.39, and its source a compiler and packages that are not on PyPI",
    },
}
"""Libraries that are never measured -> reason."""


def unsupported_reason(library: str) -> str | None:
    """Return why a library cannot run here; None if it can."""
    missing = [name for name in LIBRARIES[library].modules if importlib.util.find_spec(name) is None]
    return f"not installed: pip install {LIBRARIES[library].install}" if missing else None


def quiver_system(text: str, points: Sequence[Point]) -> System:
    """Make a Quiver system from an engine, such as ``ivf-tokens:bits=3`` or ``faiss-dense:factory=IVF64,Flat``.

    Args:
        text: Engine with settings, in the syntax of the command line.
        points: Search parameters; ignored for exact engines, which have none.

    Raises:
        InputError: The engine or a setting is unknown or malformed.

    Example:
        >>> quiver_system("ivf-tokens:bits=3,pool_factor=2", quiver_points([])).settings
        {'bits': 3, 'pool_factor': 2}
    """
    engine = parse_engine(text)
    chosen = (Point("exact", {"preset": "exact"}),) if engine.name.startswith("exact") else tuple(points)
    return System(text, OWN, engine.settings, chosen)


def quiver_points(texts: Sequence[str]) -> list[Point]:
    """Parse Quiver's search parameters: presets, or parameters such as ``nprobe=8,candidates=50``. Default: ``balanced``.

    Raises:
        InputError: A text is neither of these.
    """
    points = []
    for text in dict.fromkeys(texts or ["balanced"]):
        effort = parse_effort(text)
        points.append(Point(text, {"preset": effort} if isinstance(effort, str) else effort))
    return points


def with_filters(system: System, shares: Sequence[float], documents: int) -> System:
    """Add filtered searches to the points of a Quiver system.

    Args:
        system: The system.
        shares: Shares of the documents that match the filter, each between 0 and 1.
        documents: Number of documents; at least one matches.

    Raises:
        InputError: A share is not between 0 and 1.

    Example:
        >>> filtered = with_filters(quiver_system("pq-dense", quiver_points(["fast"])), [0.01], 2_000)
        >>> [(point.name, point.allowed) for point in filtered.points]
        [('fast', None), ('fast, 1% allowed', 20)]
    """
    wrong = [share for share in shares if not 0 < share < 1]
    if wrong:
        raise InputError(f"--filter-share must be > 0 and < 1, got {wrong[0]:g}")
    some = [
        replace(point, name=f"{point.name}, {100 * share:g}% allowed", allowed=max(1, round(share * documents)))
        for share in dict.fromkeys(shares)
        for point in system.points
    ]
    return replace(system, points=(*system.points, *some))


def default_baselines(kind: Kind) -> list[str]:
    """Return all baselines that support a kind of vectors."""
    return [name for name in BASELINES if kind in LIBRARIES[name].kinds]


def baseline_systems(text: str, *, kind: Kind, documents: int, dim: int) -> list[System]:
    """Make the systems of a baseline from its name or, for FAISS, name and factory string, such as ``faiss:HNSW32``.

    Args:
        text: Baseline, in the syntax of the command line.
        kind: Kind of vectors.
        documents: Number of documents; determines the number of lists in FAISS's IVF index.
        dim: Vector width.

    Raises:
        InputError: There is no such baseline for this kind of vectors.
    """
    name, _, factory = text.partition(":")
    library = LIBRARIES.get(name)
    if library is None or name == OWN or kind not in library.kinds:
        raise InputError(f"unknown baseline {name!r} for {kind} vectors; choose from {', '.join(default_baselines(kind))}")
    if name != "faiss":
        if factory:
            raise InputError(f"{text!r}: only faiss takes a factory string")
        return [System(name, name, {}, library.points)]
    chosen = [factory] if factory else faiss_factories(documents, dim)
    return [System(f"faiss:{each}", name, {"factory": each}, _faiss_points(each)) for each in chosen]


def faiss_factories(documents: int, dim: int) -> list[str]:
    """Return typical indexes of FAISS users: exact, a graph, and IVF with product quantization and refinement."""
    lists = 2 ** max(0, round(math.log2(4 * math.sqrt(documents))) - (1 if documents < 10_000 else 0))
    return ["Flat", "HNSW32", f"IVF{lists},PQ{dim // 2}x4fs,RFlat"]


def _faiss_points(factory: str) -> tuple[Point, ...]:
    """The library's defaults, and parameters that increase the recall of this type of index."""
    default: dict[str, Setting] = {"k_factor_rf": 1} if re.search(r"RFlat|Refine", factory) else {}
    refined: dict[str, Setting] = {"k_factor_rf": 10} if default else {}
    if "IVF" in factory:
        return _points({"nprobe": 1, **default}, {"nprobe": 8, **refined}, {"nprobe": 32, **refined})
    if "HNSW" in factory:
        return _points({"efSearch": 16}, {"efSearch": 64}, {"efSearch": 256})
    return _points(default, refined) if refined else _points(default)
