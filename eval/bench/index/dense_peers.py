"""Peers for one vector a document: FAISS, hnswlib and usearch, by inner product."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.eval.bench.index.adapters import Built, Clock, Knobs
from quiver.eval.bench.index.systems import Point, System
from quiver.eval.bench.index.vectors import VectorFolder


class _Matrix:
    """What these libraries share: queries are rows of a matrix, and what they find are labels, those for nothing left out."""

    def prepare(self, queries: Sequence[NDArray[np.float32]]) -> tuple[list[Any], Any]:
        """Matrices of one row, and of all."""
        return [np.ascontiguousarray(query[None]) for query in queries], np.stack(queries)

    def rows(self, found: Any) -> list[list[int]]:
        """Rows as integers."""
        return [[row for row in query if row >= 0] for query in found.astype(np.int64).tolist()]


def build_faiss(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """An index of FAISS by its factory string."""
    faiss = importlib.import_module("faiss")
    faiss.omp_set_num_threads(threads)
    matrix, clock = _matrix(vectors), Clock()
    index = faiss.index_factory(vectors.dim, system.settings["factory"], faiss.METRIC_INNER_PRODUCT)
    index.train(matrix)
    index.add(matrix)
    faiss.write_index(index, str(out / "index.faiss"))
    return clock.built({})


class FaissIndex(_Matrix):
    """An index of FAISS, which searches many queries on its own threads."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del vectors, system
        self._faiss = importlib.import_module("faiss")
        self._faiss.omp_set_num_threads(threads)
        self._index = self._faiss.read_index(str(folder / "index.faiss"))
        self._set: Knobs = {}

    def one(self, query: Any, k: int, point: Point) -> Any:
        """Search one query."""
        if point.knobs != self._set:
            text = ",".join(f"{name}={value}" for name, value in point.knobs.items())
            self._faiss.ParameterSpace().set_index_parameters(self._index, text)
            self._set = point.knobs
        return self._index.search(query, k)[1]

    def many(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search all queries."""
        del threads
        return self.one(queries, k, point)


def build_hnswlib(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """A graph of hnswlib, with what its documentation begins with."""
    del system
    hnswlib = importlib.import_module("hnswlib")
    matrix, clock = _matrix(vectors), Clock()
    index = hnswlib.Index(space="ip", dim=vectors.dim)
    index.init_index(max_elements=len(matrix), ef_construction=200, M=16)
    index.add_items(matrix, num_threads=threads)
    index.save_index(str(out / "index.hnswlib"))
    return clock.built({"M": 16, "ef_construction": 200})


class HnswlibIndex(_Matrix):
    """A graph of hnswlib."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del system, threads
        self._index = importlib.import_module("hnswlib").Index(space="ip", dim=vectors.dim)
        self._index.load_index(str(folder / "index.hnswlib"))
        self._documents = len(vectors)

    def one(self, query: Any, k: int, point: Point) -> Any:
        """Search one query."""
        return self.many(query, k, point, 1)

    def many(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search all queries; it wants ef >= k and k documents at least."""
        depth = min(k, self._documents)
        self._index.set_ef(max(int(point.knobs["ef"] or 0), depth))
        return self._index.knn_query(queries, k=depth, num_threads=threads)[0]


def build_usearch(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """A graph of usearch with its defaults, in float32."""
    del system
    index_class = importlib.import_module("usearch.index").Index
    matrix, clock = _matrix(vectors), Clock()
    index = index_class(ndim=vectors.dim, metric="ip", dtype="f32")
    index.add(np.arange(len(matrix)), matrix, threads=threads)
    index.save(str(out / "index.usearch"))
    return clock.built({"connectivity": int(index.connectivity), "expansion_add": int(index.expansion_add)})


class UsearchIndex(_Matrix):
    """A graph of usearch."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del system, threads
        self._index = importlib.import_module("usearch.index").Index(ndim=vectors.dim, metric="ip", dtype="f32")
        self._index.load(str(folder / "index.usearch"))
        self._documents = len(vectors)

    def one(self, query: Any, k: int, point: Point) -> Any:
        """Search one query."""
        return self.many(query, k, point, 1)

    def many(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search all queries."""
        self._index.expansion_search = point.knobs["expansion_search"]
        return self._index.search(queries, min(k, self._documents), threads=threads)

    def rows(self, found: Any) -> list[list[int]]:
        """Rows as integers; of many queries it says how many each has."""
        keys = found.keys.astype(np.int64)
        if keys.ndim == 1:
            return [keys.tolist()]
        return [row[: int(count)].tolist() for row, count in zip(keys, found.counts, strict=True)]


def _matrix(vectors: VectorFolder) -> NDArray[np.float32]:
    return vectors.documents(0, len(vectors))[0]
