"""Settings and search parameters of the compressed dense engines, and their defaults by the size of an index.

Shapes: n documents, d width, k hits.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from quiver.encoder.schema import Field, Positive
from quiver.retrieval.index.engines import FAISS_DENSE, IVF_DENSE, PQ_DENSE, EngineSettings, Preset

Bits: TypeAlias = Literal[8, 16]
"""Bits of a code of the refine store."""

_SAMPLE, _SAMPLE_A_LIST, _MOST_LISTS, _MOST_PROBES = 65_536, 32, 16_384, 256
# Documents, and centroids, that the search of a graph of FAISS's keeps in sight.
_GRAPH, _QUANTIZER = 128, 48
# Candidates of a search for few hits, and for each hit of many; where a code stands for eight coordinates, so many times as many.
_CANDIDATES: dict[Preset, tuple[float, float]] = {"exact": (150.0, 5.0), "balanced": (150.0, 5.0), "fast": (60.0, 3.0)}
_BLURRED = 2.8
# A width from which a code may stand for four coordinates without a loss that would count.
_WIDE = 384

_COUNTS = ("nprobe", "efSearch", "quantizer_efSearch")


class Sizes(NamedTuple):
    """Defaults for an index of a given number of documents."""

    lists: int  # number of inverted lists K
    nprobe: int  # number of inverted lists to search
    sample: int  # number of training vectors of the codec


def sizes(documents: int) -> Sizes:
    """Return the defaults for a number of documents.

    K is a power of two near 2 sqrt(n), a quarter of what is usual for FAISS: here a coordinate of a centroid costs the time of sixteen
    coordinates of a code, k-means takes K^2, and lists are probed a few hundred at a time. An eighth of them, 256 at most, is probed.
    A centroid learns from 32 vectors, a codebook from 4,096.

    Source: the limits are those measured with FAISS 1.15 for this project (100,000 vectors of width 128, one thread); the usual K and the
    vectors a centroid, FAISS's guidelines to choose an index, https://github.com/facebookresearch/faiss/wiki/Guidelines-to-choose-an-index.

    Example:
        >>> sizes(100_000)
        Sizes(lists=512, nprobe=64, sample=65536)
    """
    lists = min(_MOST_LISTS, 2 ** round(math.log2(2 * max(documents, 1) ** 0.5)))
    return Sizes(lists, probes(lists), max(_SAMPLE, _SAMPLE_A_LIST * lists))


def coordinates(width: int) -> int:
    """Default number of coordinates per code of ``pq-dense``: 4 for wide vectors, otherwise 2.

    On 100,000 sentences of all-MiniLM-L6-v2 (width 384), ten hits, one thread of a Xeon at 2.3 GHz, codes for 4 and 8 coordinates find
    0.997 and 0.994 of the best at ``balanced``, in 0.40 and 0.37 ms, and at ``fast`` 0.990 and 0.982, in 0.37 and 0.29 ms. Codes for 2
    find 0.997 at either and take 1.4 times as long as those for 4; of a hundred hits they find more for the time that they take.
    """
    return 4 if width >= _WIDE else 2


def probes(lists: int, preset: Preset = "balanced") -> int:
    """Default number of lists to search: all for ``exact``, a quarter of ``balanced`` for ``fast``.

    Example:
        >>> [probes(4096, preset) for preset in ("exact", "balanced", "fast")]
        [4096, 256, 64]
    """
    usual = min(lists, max(8, min(_MOST_PROBES, lists // 8)))
    return {"exact": lists, "balanced": usual, "fast": -(-usual // 4)}[preset]


def sample_size(documents: int) -> int:
    """Number of vectors that the codec of an index with this number of documents is trained on."""
    return min(documents, sizes(documents).sample)


class ScanSettings(EngineSettings):
    """Settings of ``pq-dense``."""

    engine = PQ_DENSE
    # Coordinates per 4-bit code: twice as many halve the memory and time of a scan and need a larger k_factor. None chooses by width.
    dsub: Literal[2, 4, 8] | None = None
    bits: Bits = 8  # per coordinate of the refine store: 16 doubles its size on disk and makes the error negligible


class ListSettings(EngineSettings):
    """Settings of ``ivf-dense``; see `ScanSettings`."""

    engine = IVF_DENSE
    dsub: Literal[2, 4, 8] = 2
    bits: Bits = 8
    nlist: Positive | None = None  # lists K; None chooses by size


def _check_factory(factory: str) -> str:
    if not factory:
        raise PydanticCustomError("factory", "missing; give a FAISS factory string such as factory=HNSW32,Flat")
    return factory


class FactorySettings(EngineSettings):
    """Settings of ``faiss-dense``; see `ScanSettings`."""

    engine = FAISS_DENSE
    factory: Annotated[str, AfterValidator(_check_factory)] = Field(default="", validate_default=True)
    bits: Bits = 8


@dataclass(frozen=True)
class DenseParams:
    """Search parameters of the compressed dense engines, with FAISS's names; 0 if the index has no such parameter."""

    nprobe: Positive  # inverted lists to search
    efSearch: Positive  # noqa: N815 - size of the candidate queue of a graph search
    quantizer_efSearch: Positive  # noqa: N815 - size of the candidate queue of a graph search over centroids
    k_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]  # candidates per requested hit whose final scores are computed
    exhaustive: bool = False  # compute the final scores of all documents; the other search parameters are ignored then


@dataclass(frozen=True)
class Presets:
    """What the search parameters of an index depend on.

    Example:
        >>> presets = Presets(("nprobe",), lists=64)
        >>> presets.params("balanced", 10)
        DenseParams(nprobe=8, efSearch=0, quantizer_efSearch=0, k_factor=15.0, exhaustive=False)
        >>> [(params.nprobe, round(params.k_factor, 1)) for params in presets.grid(10, documents=999)]
        [(1, 1.5), (1, 3.0), (2, 6.0), (4, 9.5), (8, 15.0), (16, 30.0), (32, 60.0), (64, 60.0), (64, 15.0)]
    """

    has: Collection[str]  # names of the counts that it can be searched with
    lists: int  # number of its inverted lists; 0 if it has none
    dsub: int = 2  # coordinates per code

    def params(self, preset: Preset, k: int) -> DenseParams:
        """Search parameters for k hits: few hits need more candidates each, many hits share theirs."""
        nprobe = probes(self.lists, preset) if "nprobe" in self.has else 0
        few, each = _CANDIDATES[preset]
        return DenseParams(
            nprobe,
            efSearch=(_GRAPH // 2 if preset == "fast" else _GRAPH) if "efSearch" in self.has else 0,
            quantizer_efSearch=max(_QUANTIZER, 2 * nprobe) if "quantizer_efSearch" in self.has else 0,
            k_factor=max(each, few / k) * (_BLURRED if self.dsub == 8 else 1.0),
            exhaustive=preset == "exact",
        )

    def grid(self, k: int, *, documents: int) -> list[DenseParams]:
        """The parameter grid, cheap to exhaustive, without duplicates.

        A quarter and a half of ``fast``, the presets and the geometric mean of the first two, and ``balanced`` doubled until every list is
        searched and half of all documents are candidates.
        """
        fast, balanced, exact = (self.params(preset, k) for preset in ("fast", "balanced", "exact"))
        # Where more are candidates it is faster to compute all scores.
        most = max(4 * balanced.k_factor, documents / (2 * k))

        def scaled(params: DenseParams, factor: float) -> DenseParams:
            counts: dict[str, Any] = {name: max(1, round(factor * getattr(params, name))) for name in _COUNTS if getattr(params, name)}
            if "nprobe" in counts:
                counts["nprobe"] = min(counts["nprobe"], self.lists)
            return replace(params, k_factor=min(most, max(1.0, factor * params.k_factor)), **counts)

        ends = ((most, balanced.k_factor), (self.lists, balanced.nprobe), (documents, balanced.efSearch))
        steps = math.ceil(math.log2(max(end / value for end, value in ends if value)))
        means: dict[str, Any] = {name: round(math.sqrt(getattr(fast, name) * getattr(balanced, name))) for name in _COUNTS}
        between = replace(balanced, k_factor=math.sqrt(fast.k_factor * balanced.k_factor), **means)
        cheap, thorough = [scaled(fast, factor) for factor in (0.25, 0.5)], [scaled(balanced, 2.0**step) for step in range(1, steps + 1)]
        return list(dict.fromkeys([*cheap, fast, between, balanced, *thorough, exact]))
