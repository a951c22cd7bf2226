"""The choice between compiled loops and NumPy, made once in a process."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)


class Kernels(Protocol):
    """The functions that both modules have; contracts in `quiver.retrieval.index.kernels.reference`."""

    def quantise(
        self, residuals: NDArray[np.float32], pairs: NDArray[np.float32], cells: NDArray[np.uint8], rounds: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Codes and scales of residuals."""

    def nearest(
        self,
        vectors: NDArray[np.float32],
        first: NDArray[np.int64],
        last: NDArray[np.int64],
        lanes: NDArray[np.float32],
        half_squares: NDArray[np.float32],
    ) -> NDArray[np.int64]:
        """The nearest centroid of each vector in its range."""

    def probe(
        self, query: NDArray[np.float32], lanes: NDArray[np.float32], centroids: int, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Inner products with all centroids, and the centroids with the greatest."""

    def estimate(
        self,
        coarse: NDArray[np.uint8],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        similarities: NDArray[np.float32],
        table: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """MaxSim of a query with the coarse parts of documents."""

    def score(
        self,
        coarse: NDArray[np.uint8],
        fine: NDArray[np.uint8],
        begins: NDArray[np.int64],
        ends: NDArray[np.int64],
        similarities: NDArray[np.float32],
        products: NDArray[np.float32],
        pairs: NDArray[np.float32],
        query: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """MaxSim of a query with documents."""

    def inner_products(
        self,
        codes: NDArray[np.signedinteger[Any]],
        scales: NDArray[np.float32],
        rows: NDArray[np.int64],
        weights: NDArray[np.float64],
        offset: float,
    ) -> NDArray[np.float64]:
        """Inner products of one query with coded vectors."""

    def nearest_of(
        self,
        codes: NDArray[np.signedinteger[Any]],
        scales: NDArray[np.float32],
        rows: NDArray[np.int64],
        weights: NDArray[np.float64],
        offset: float,
        ranks: NDArray[np.uint32],
        k: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], float]:
        """The best of some coded vectors."""

    def aggregate(
        self, similarities: NDArray[np.float32], rows: NDArray[np.int64], below: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Documents that a query's tokens have met."""

    def ward(self, distances: NDArray[np.float64], clusters: int) -> NDArray[np.int64]:
        """Clusters of points."""


@cache
def kernels() -> Kernels:
    """The compiled loops, or their NumPy reference, several times slower, where numba is not installed or can keep no compiled code."""
    if importlib.util.find_spec("numba") is None:
        from quiver.retrieval.index.kernels import reference

        logger.warning("numba is not installed: indexes of compressed vectors are searched several times more slowly")
        return reference
    from quiver.encoder.cpu.jit import can_cache  # takes half a second, so not before it is needed

    if not can_cache():
        from quiver.retrieval.index.kernels import reference

        return reference
    from quiver.retrieval.index.kernels import compiled

    return compiled
