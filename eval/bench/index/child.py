"""A fresh process that builds or searches one index: ``python -m eval.index_quality.child``.

It speaks as `quiver.eval.bench.encoder.child` does: the first line is an `IndexChild`, each further one a task:

    {"task": "build"}                        -> seconds, processor seconds, memory, settings that were chosen
    {"task": "memory"}                       -> what the open index has taken
    {"task": "each", "point": 0, "k": 10}    -> milliseconds of each query alone, processor seconds of all, rows that were found
    {"task": "all", "point": 0, "k": 10}     -> seconds of all queries in one call
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.child import Reply, answer_requests, reset_high_water_mark, resident
from quiver.eval.bench.encoder.results import OWN
from quiver.eval.bench.index.adapters import Builder, Opened, Opener
from quiver.eval.bench.index.dense_peers import FaissIndex, HnswlibIndex, UsearchIndex, build_faiss, build_hnswlib, build_usearch
from quiver.eval.bench.index.own import OwnIndex, build_own
from quiver.eval.bench.index.systems import LIBRARIES, Point, System
from quiver.eval.bench.index.token_peers import FastPlaidIndex, VoyagerIndex, WarpIndex, build_fast_plaid, build_voyager, build_warp
from quiver.eval.bench.index.vectors import VectorFolder

MODULE = "quiver.eval.bench.index.child"

ADAPTERS: Mapping[str, tuple[Builder, Opener]] = {
    OWN: (build_own, OwnIndex),
    "faiss": (build_faiss, FaissIndex),
    "hnswlib": (build_hnswlib, HnswlibIndex),
    "usearch": (build_usearch, UsearchIndex),
    "fast-plaid": (build_fast_plaid, FastPlaidIndex),
    "warp": (build_warp, WarpIndex),
    "voyager": (build_voyager, VoyagerIndex),
}
"""Library -> how it builds and opens."""


@dataclass(frozen=True)
class ChildSettings:
    """How a child works.

    Attributes:
        threads: That it may use.
    """

    threads: int


@dataclass(frozen=True)
class IndexChild:
    """What a child is about.

    Attributes:
        library: A key of ``ADAPTERS``.
        model: The folder of vectors.
        vectors: The other fields of its `VectorFolder`.
        system: The system.
        folder: Where the index is, or goes.
        opened: Open the index; otherwise it is there to build one.
        settings: How it works.
    """

    library: str
    model: str
    vectors: Mapping[str, Any]
    system: System
    folder: str
    opened: bool
    settings: ChildSettings


def _load(first: dict[str, Any]) -> tuple[Reply, None]:
    vectors = VectorFolder(Path(first["model"]), **first["vectors"])
    points = tuple(Point(**point) for point in first["system"]["points"])
    system = System(**{**first["system"], "points": points})
    threads, folder = int(first["settings"]["threads"]), Path(first["folder"])
    build, opener = ADAPTERS[system.library]
    if not first["opened"]:
        return lambda request: _built(build, vectors, system, folder, threads), None
    for module in LIBRARIES[system.library].imports:
        importlib.import_module(module)
    queries = vectors.queries
    before, started = _memory(), perf_counter()
    index = opener(vectors, system, folder, threads)
    return _Searcher(index, queries, system, threads, opening={"seconds": perf_counter() - started, "before": before}).reply, None


def _built(build: Builder, vectors: VectorFolder, system: System, folder: Path, threads: int) -> dict[str, Any]:
    for module in LIBRARIES[system.library].imports:
        importlib.import_module(module)
    folder.mkdir(parents=True)
    reset_high_water_mark()
    before = resident("VmRSS")
    built = build(vectors, system, folder, threads)
    return {**asdict(built), "before": before, "peak": resident("VmHWM")}


class _Searcher:
    """An open index and the queries."""

    def __init__(
        self, index: Opened, queries: Sequence[NDArray[np.float32]], system: System, threads: int, *, opening: Mapping[str, Any]
    ) -> None:
        self._index, self._system, self._threads, self._opening = index, system, threads, opening
        self._single, self._together = index.prepare(queries)

    def reply(self, request: dict[str, Any]) -> Mapping[str, Any]:
        """Do a task; a point that the library does not take is an answer, not an end."""
        tasks: Mapping[str, Callable[[dict[str, Any]], Mapping[str, Any]]] = {"memory": self._memory, "each": self._each, "all": self._all}
        try:
            return tasks[request["task"]](request)
        except InputError as error:
            return {"refused": str(error)}

    def _memory(self, request: dict[str, Any]) -> Mapping[str, Any]:
        del request
        now, before = _memory(), self._opening["before"]
        return {
            "open_seconds": self._opening["seconds"],
            "before": before["VmRSS"],
            "private": max(0, now["RssAnon"] - before["RssAnon"]),
            "mapped": max(0, now["RssFile"] - before["RssFile"]),
            "peak": resident("VmHWM"),
        }

    def _each(self, request: dict[str, Any]) -> Mapping[str, Any]:
        k, point = int(request["k"]), self._system.points[request["point"]]
        milliseconds, found = [], []
        processor = process_time()
        for query in self._single:
            started = perf_counter()
            hits = self._index.one(query, k, point)
            milliseconds.append(1000 * (perf_counter() - started))
            found.append(hits)
        processor = process_time() - processor
        rows = [row for hits in found for row in self._index.rows(hits)] if request["rows"] else []
        return {"milliseconds": milliseconds, "processor_seconds": processor, "rows": rows}

    def _all(self, request: dict[str, Any]) -> Mapping[str, Any]:
        started = perf_counter()
        self._index.many(self._together, int(request["k"]), self._system.points[request["point"]], self._threads)
        return {"seconds": perf_counter() - started}


def _memory() -> dict[str, int]:
    return {name: resident(name) for name in ("VmRSS", "RssAnon", "RssFile")}


if __name__ == "__main__":
    answer_requests(_load)
