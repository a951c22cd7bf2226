"""Peers for one vector a token: fast-plaid by itself, and WARP and Voyager as PyLate uses them, on the CPU.

fast-plaid is called directly and not through PyLate, whose index reads a file of ids for every search.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.eval.bench.index.adapters import Built, Clock
from quiver.eval.bench.index.systems import Point, System
from quiver.eval.bench.index.vectors import VectorFolder


class _Tensors:
    """What these libraries share: a query is a tensor, and a hit a pair or a mapping."""

    def prepare(self, queries: Sequence[NDArray[np.float32]]) -> tuple[list[Any], Any]:
        """Lists of one tensor, and of all."""
        torch = importlib.import_module("torch")
        tensors = [torch.from_numpy(np.array(query)) for query in queries]
        return [[tensor] for tensor in tensors], tensors

    def rows(self, found: Any) -> list[list[int]]:
        """Rows as integers."""
        return [[int(hit["id"] if isinstance(hit, dict) else hit[0]) for hit in hits] for hits in found]


def build_fast_plaid(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """PLAID's index at its default of 4 bits."""
    del system, threads
    index_class = importlib.import_module("fast_plaid.search").FastPlaid
    tensors, clock = _tensors(vectors), Clock()
    index_class(index=str(out / "plaid"), device="cpu").create(documents_embeddings=tensors)
    return clock.built({"bits": 4})


class FastPlaidIndex(_Tensors):
    """PLAID's index in memory, as PyLate opens it."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del vectors, system, threads
        self._index = importlib.import_module("fast_plaid.search").FastPlaid(index=str(folder / "plaid"), device="cpu", low_memory=False)

    def one(self, query: Any, k: int, point: Point) -> Any:
        """Search one query."""
        return self.many(query, k, point, 1)

    def many(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search all queries; a share of them on each thread."""
        return self._index.search(
            queries,
            top_k=k,
            n_full_scores=point.knobs["n_full_scores"],
            n_ivf_probe=point.knobs["n_ivf_probe"],
            n_processes=threads,
            show_progress=False,
        )


def build_warp(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """WARP's index as PyLate makes it, at its default of 4 bits."""
    del system
    tensors, clock = _tensors(vectors), Clock()
    _open_warp(out, threads).add_documents(documents_ids=_names(vectors), documents_embeddings=tensors)
    return clock.built({"bits": 4})


class WarpIndex(_Tensors):
    """WARP's index as PyLate opens it."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del vectors, system
        self._index = _open_warp(folder, threads)

    def one(self, query: Any, k: int, point: Point) -> Any:
        """Search one query."""
        return self.many(query, k, point, 1)

    def many(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search all queries."""
        del threads
        self._index.n_ivf_probe = point.knobs["n_ivf_probe"]
        return self._index(queries, k=k)


def build_voyager(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """A graph of all token vectors, as PyLate makes it."""
    del system, threads
    documents, clock = _split(vectors), Clock()
    index = _open_voyager(out, vectors.dim)
    index.add_documents(documents_ids=_names(vectors), documents_embeddings=documents)
    return clock.built({"M": 64, "ef_construction": 200})


class VoyagerIndex(_Tensors):
    """A graph of token vectors with PyLate's retriever, which scores in full what the tokens found."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del system, threads
        self._index = _open_voyager(folder, vectors.dim)
        self._retriever = importlib.import_module("pylate.retrieve").ColBERT(index=self._index)

    def one(self, query: Any, k: int, point: Point) -> Any:
        """Search one query."""
        return self.many(query, k, point, 1)

    def many(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search all queries."""
        del threads
        self._index.ef_search = point.knobs["ef_search"]
        return self._retriever.retrieve(queries_embeddings=queries, k=k, k_token=point.knobs["k_token"], device="cpu")


def _open_warp(folder: Path, threads: int) -> Any:
    index_class = importlib.import_module("pylate.indexes").WARP
    return index_class(index_folder=str(folder), index_name="warp", device="cpu", num_threads=threads, show_progress=False)


def _open_voyager(folder: Path, dim: int) -> Any:
    return importlib.import_module("pylate.indexes").Voyager(index_folder=str(folder), index_name="voyager", embedding_size=dim)


def _names(vectors: VectorFolder) -> list[str]:
    return [str(row) for row in range(len(vectors))]


def _split(vectors: VectorFolder) -> list[NDArray[np.float32]]:
    matrix, _ = vectors.documents(0, len(vectors))
    return np.split(matrix, np.cumsum(vectors.lengths)[:-1])


def _tensors(vectors: VectorFolder) -> list[Any]:
    torch = importlib.import_module("torch")
    return [torch.from_numpy(np.ascontiguousarray(document)) for document in _split(vectors)]
