"""Quiver's side of the benchmark: an index as its users build it, durable and with ids, from vectors that are already there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.eval.bench.index.adapters import Built, Clock, Knobs
from quiver.eval.bench.index.systems import Point, System
from quiver.eval.bench.index.vectors import VectorFolder, drawn, text_sha256
from quiver.retrieval.index.build import build_index
from quiver.retrieval.index.documents.metadata import Condition, Filter
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.index import Index, open_index
from quiver.retrieval.index.pieces import BuildOptions
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, Role, TextTokens, TokenEncoding

# FAISS's type stubs know nothing of what its Python layer adds.
_faiss: Any = faiss

# Documents that are indexed before the clock starts, so that what is compiled is compiled.
_WARM_UP = 1_000
# The field that filters are of.
_DRAWN = "drawn"


class FolderModel:
    """A model that encodes documents by looking their vectors up: the text of a document is its row.

    Attributes:
        clock: Stands still while vectors are read, as if they had been encoded before.
    """

    def __init__(self, vectors: VectorFolder) -> None:
        self._vectors = vectors
        self.clock: Clock | None = None
        path, dense = str(vectors.path), vectors.kind == "dense"
        self.card = ModelCard(path, vectors.kind, text_sha256(path), vectors.dim, "dot" if dense else "maxsim", 0, 0)

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        """The vectors of documents."""
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
            self.clock.pause(reading)
        return DenseEncoding(vectors, tokens) if self.card.kind == "dense" else TokenEncoding(np.split(vectors, ends), tokens, split_ids)


def build_own(vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
    """An index of Quiver, as `build_index` makes it, committed to the disk."""
    del threads
    model = FolderModel(vectors)
    # Recall is measured here: the measurement that a build makes of itself is no part of building.
    options = BuildOptions(engine=system.engine, settings=system.settings, store_text=False, calibrate=False)
    documents = [Document(key, str(row)) for row, key in enumerate(vectors.ids)]
    if any(point.allowed is not None for point in system.points):
        places = drawn(len(documents)).tolist()
        documents = [document._replace(metadata={_DRAWN: place}) for document, place in zip(documents, places, strict=True)]
    warm_up = BuildOptions(system.engine, warm_up_settings(system.settings), store_text=False, calibrate=False)
    build_index(documents[:_WARM_UP], model, out / "warm-up", options=warm_up)
    shutil.rmtree(out / "warm-up")
    model.clock = clock = Clock()
    index = build_index(documents, model, out / "index", options=options)
    return clock.built({"engine": index.kind, **index.parameters})


def warm_up_settings(settings: Knobs) -> dict[str, Setting]:
    """What of an engine's settings suits the few documents of a warm-up: no number of lists, and of FAISS's indexes the plainest.

    Example:
        >>> warm_up_settings({"bits": 16, "factory": "IVF4096,Flat"}), warm_up_settings({"nlist": 4096})
        ({'bits': 16, 'factory': 'Flat'}, {})
    """
    return {name: "Flat" if name == "factory" else value for name, value in settings.items() if name in ("bits", "factory")}


class OwnIndex:
    """An index of Quiver."""

    def __init__(self, vectors: VectorFolder, system: System, folder: Path, threads: int) -> None:
        del system, threads
        self._index: Index = open_index(folder / "index")
        self._dense = vectors.kind == "dense"

    def prepare(self, queries: Sequence[NDArray[np.float32]]) -> tuple[list[Any], Any]:
        """As `Index.search` takes them."""
        if self._dense:
            return [query[None] for query in queries], np.stack(queries)
        return [[query] for query in queries], list(queries)

    def one(self, query: Any, k: int, point: Point) -> Any:
        """Search one query."""
        return [self._index.search(query, k, filter=_filter(point), effort=_effort(point))]

    def many(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search all queries, a share of them on each thread."""
        effort, filter = _effort(point), _filter(point)
        if threads == 1:
            return [self._index.search(queries, k, filter=filter, effort=effort)]
        ends = np.linspace(0, len(queries), threads + 1).astype(int)
        parts = [queries[start:stop] for start, stop in pairwise(ends.tolist()) if start < stop]
        # OpenMP's number of threads is that of the calling thread: each of these is one of the threads.
        with ThreadPoolExecutor(threads, initializer=_faiss.omp_set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda part: self._index.search(part, k, filter=filter, effort=effort), parts))

    def rows(self, found: Any) -> list[list[int | str]]:
        """Ids, which whoever asked knows the rows of: a table of them is no part of the index's memory."""
        return [list(ids) for hits in found for ids in hits.ids]


def _effort(point: Point) -> Any:
    return point.knobs.get("preset", point.knobs)


def _filter(point: Point) -> Filter | None:
    return None if point.allowed is None else Filter((Condition(_DRAWN, "<", (point.allowed,)),))
