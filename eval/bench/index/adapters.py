"""How a library is asked to build an index from the vectors of a folder, to open it and to search it.

Every library gets the same float32 vectors and gives rows of documents. What is prepared before the clock starts is the vectors in
the form that a user of the library has them in: for Quiver an encoder that reads the folder, for PLAID a list of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.eval.bench.index.systems import Point, System
from quiver.eval.bench.index.vectors import VectorFolder
from quiver.retrieval.index.engines import Setting

Knobs: TypeAlias = Mapping[str, Setting]


@dataclass(frozen=True)
class Built:
    """What a build took, without reading the vectors.

    Attributes:
        seconds: Wall clock.
        processor_seconds: Of all threads.
        parameters: Settings that a report tells.
    """

    seconds: float
    processor_seconds: float
    parameters: Mapping[str, Setting]


class Clock:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._started: tuple[float, ...] = _now()

    def pause(self, former: Clock) -> None:
        """Take what has passed since another clock was made out of this one."""
        self._started = tuple(mine + now - then for mine, now, then in zip(self._started, _now(), former._started, strict=True))

    def built(self, parameters: Mapping[str, Setting]) -> Built:
        """What has passed."""
        seconds, processor = (now - then for now, then in zip(_now(), self._started, strict=True))
        return Built(seconds, processor, dict(parameters))


def _now() -> tuple[float, float]:
    return perf_counter(), process_time()


class Opened(Protocol):
    """An index that can be searched."""

    def prepare(self, queries: Sequence[NDArray[np.float32]]) -> tuple[list[Any], Any]:
        """Each query as one search takes it, and all of them as one search of all takes them; not timed."""

    def one(self, query: Any, k: int, point: Point) -> Any:
        """Search one query."""

    def many(self, queries: Any, k: int, point: Point, threads: int) -> Any:
        """Search all queries."""

    def rows(self, found: Any) -> Sequence[Sequence[int | str]]:
        """Rows of documents from what a search gave, or their ids, best first; not timed."""


class Builder(Protocol):
    """Makes an index."""

    def __call__(self, vectors: VectorFolder, system: System, out: Path, threads: int) -> Built:
        """Build an index into an empty folder, on so many threads."""


Opener: TypeAlias = Callable[[VectorFolder, System, Path, int], Opened]
"""Opens what a builder wrote, for so many threads."""
