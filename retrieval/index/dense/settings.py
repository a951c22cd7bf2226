"""Settings and search parameters of the compressed dense engines, and their defaults by the size of an index.

Shapes: n documents, d width, k hits.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from quiver.encoder.schema import Field, Positive
from quiver.retrieval.index.dense.refine import Bits
from quiver.retrieval.index.engines import FAISS_DENSE, IVF_DENSE, PQ_DENSE, EngineSettings, Preset

_SAMPLE = 65_536
_SAMPLE_A_LIST = 32
_MOST_LISTS = 16_384
_MOST_PROBES = 256
Dsub: TypeAlias = Literal[2, 4, 8]
"""Coordinates per code."""
Factor: TypeAlias = Annotated[float, Field(ge=1, allow_inf_nan=False)]
"""Candidates per hit."""
# Documents, and centroids, that the search of a graph of FAISS's keeps in sight.
_GRAPH, _QUANTIZER = 128, 48
# Candidates of a search for few hits, and for each hit of many; where a code stands for eight coordinates, so many times as many.
_CANDIDATES = {"balanced": (150.0, 5.0), "fast": (60.0, 3.0)}
_BLURRED = 2.8
# A width from which a code may stand for four coordinates without a loss that would count.
_WIDE = 384


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
        >>> sizes(5_000_000)
        Sizes(lists=4096, nprobe=256, sample=131072)
    """
    lists = min(_MOST_LISTS, 2 ** round(math.log2(2 * max(documents, 1) ** 0.5)))
    return Sizes(lists, probes(lists), max(_SAMPLE, _SAMPLE_A_LIST * lists))


def coordinates(width: int) -> int:
    """Default number of coordinates per code of ``pq-dense``: 4 for wide vectors, otherwise 2.

    On 100,000 sentences of all-MiniLM-L6-v2 (width 384), ten hits, one thread of a Xeon at 2.3 GHz, codes for 4 and 8 coordinates find
    0.997 and 0.994 of the best at ``balanced``, in 0.40 and 0.37 ms, and at ``fast`` 0.990 and 0.982, in 0.37 and 0.29 ms. Codes for 2
    find 0.997 at either and take 1.4 times as long as those for 4; of a hundred hits they find more for the time that they take.

    Example:
        >>> coordinates(128), coordinates(768)
        (2, 4)
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
    """Settings of ``pq-dense``.

    Attributes:
        dsub: Coordinates per 4-bit code, 2, 4 or 8: twice as many halve the memory and time of a scan and need a larger
            k_factor. None chooses by width; see `coordinates`.
        bits: Bits per coordinate of the refine store, 8 or 16: 16 doubles its size on disk and makes the error negligible.
    """

    engine = PQ_DENSE
    dsub: Dsub | None = None
    bits: Bits = 8


class ListSettings(EngineSettings):
    """Settings of ``ivf-dense``.

    Attributes:
        dsub: As in `ScanSettings`; default 2.
        bits: As in `ScanSettings`.
        nlist: Lists K; None chooses by size.
    """

    engine = IVF_DENSE
    dsub: Dsub = 2
    bits: Bits = 8
    nlist: Positive | None = None


def _check_factory(factory: str) -> str:
    if not factory:
        raise PydanticCustomError("factory", "missing; give a FAISS factory string such as factory=HNSW32,Flat")
    return factory


class FactorySettings(EngineSettings):
    """Settings of ``faiss-dense``.

    Attributes:
        factory: FAISS's factory string.
        bits: As in `ScanSettings`.
    """

    engine = FAISS_DENSE
    factory: Annotated[str, AfterValidator(_check_factory)] = Field(default="", validate_default=True)
    bits: Bits = 8


@dataclass(frozen=True)
class ScanParams:
    """Search parameters of ``pq-dense``; all codes are scanned.

    Attributes:
        k_factor: Candidates per requested hit whose final scores are computed.
        exhaustive: Compute the final scores of all documents; the other search parameters are ignored then.
    """

    k_factor: Factor
    exhaustive: bool = False

    @property
    def nprobe(self) -> int:
        """Number of inverted lists to search: there is one."""
        return 1


@dataclass(frozen=True)
class ListParams:
    """Search parameters of ``ivf-dense``.

    Attributes:
        nprobe: Number of inverted lists to search.
        k_factor: As in `ScanParams`.
        exhaustive: As in `ScanParams`.
    """

    nprobe: Positive
    k_factor: Factor
    exhaustive: bool = False


@dataclass(frozen=True)
class FaissParams:
    """Search parameters of ``faiss-dense``, with FAISS's names; 0 if the index has no such parameter.

    Attributes:
        nprobe: Number of inverted lists to search.
        efSearch: Size of the candidate queue of a graph search.
        quantizer_efSearch: Size of the candidate queue of a graph search over centroids.
        k_factor: As in `ScanParams`.
        exhaustive: As in `ScanParams`.
    """

    nprobe: Positive
    efSearch: Positive  # noqa: N815
    quantizer_efSearch: Positive  # noqa: N815
    k_factor: Factor
    exhaustive: bool = False


def faiss_params(preset: Preset, k: int, has: Collection[str], *, lists: int) -> FaissParams:
    """Search parameters of ``faiss-dense`` for k hits.

    Args:
        preset: The preset.
        k: Number of hits.
        has: Names of the search settings of the index.
        lists: Number of its inverted lists; 0 if it has none.
    """
    nprobe = probes(lists, preset) if "nprobe" in has else 0
    graph = _GRAPH // 2 if preset == "fast" else _GRAPH
    return FaissParams(
        nprobe,
        efSearch=graph if "efSearch" in has else 0,
        quantizer_efSearch=max(_QUANTIZER, 2 * nprobe) if "quantizer_efSearch" in has else 0,
        k_factor=k_factor(preset, k),
        exhaustive=preset == "exact",
    )


SearchParams = TypeVar("SearchParams", bound=ScanParams | ListParams | FaissParams)


def k_factor(preset: Preset, k: int, *, dsub: int = 2) -> float:
    """Candidates per hit for k hits: few hits need more candidates each, many hits share theirs.

    Args:
        preset: The preset.
        k: Number of hits.
        dsub: Coordinates per code.

    Example:
        >>> [k_factor("balanced", k) for k in (1, 10, 100)]
        [150.0, 15.0, 5.0]
    """
    few, each = _CANDIDATES["fast" if preset == "fast" else "balanced"]
    return max(each, few / k) * (_BLURRED if dsub == 8 else 1.0)


def param_grid(
    fast: SearchParams, balanced: SearchParams, exact: SearchParams, *, k: int, lists: int, documents: int
) -> list[SearchParams]:
    """The parameter grid, cheap to exhaustive, without duplicates: fractions of ``fast``, the presets, steps from ``balanced`` upward.

    Args:
        fast: Parameters of the preset ``fast``; the grid begins with a quarter and a half of them, and has their mean with ``balanced``.
        balanced: Parameters of the preset ``balanced``; they double until every list is searched and half of all documents are candidates.
        exact: Parameters of the preset ``exact``.
        k: Number of hits.
        lists: Number of lists of the index, the upper limit of nprobe.
        documents: Number of documents of the largest segment.

    Example:
        >>> fast, balanced, exact = ListParams(8, 6.0), ListParams(32, 15.0), ListParams(64, 15.0, exhaustive=True)
        >>> [(params.nprobe, round(params.k_factor, 1)) for params in param_grid(fast, balanced, exact, k=10, lists=64, documents=999)]
        [(2, 1.5), (4, 3.0), (8, 6.0), (16, 9.5), (32, 15.0), (64, 30.0), (64, 60.0), (64, 15.0)]
    """
    cheap = [_scaled(fast, factor, lists=lists) for factor in (0.25, 0.5)]
    # Where more are candidates it is faster to compute all scores.
    most = max(4 * balanced.k_factor, documents / (2 * k))
    search_params = asdict(balanced)
    ends = [
        end / search_params[name]
        for name, end in (("k_factor", most), ("nprobe", lists), ("efSearch", documents))
        if search_params.get(name)
    ]
    steps = math.ceil(math.log2(max(ends)))
    thorough = [_scaled(balanced, 2.0**step, lists=lists, most=most) for step in range(1, steps + 1)]
    return list(dict.fromkeys([*cheap, fast, *_between(fast, balanced), balanced, *thorough, exact]))


def _scaled(params: SearchParams, factor: float, *, lists: int, most: float = math.inf) -> SearchParams:
    """All search parameters times a factor; ``nprobe`` is at most the number of lists, ``k_factor`` at most ``most``."""
    search_params: dict[str, Any] = {"k_factor": min(most, max(1.0, factor * params.k_factor))}
    for name in ("nprobe", "efSearch", "quantizer_efSearch"):
        if value := asdict(params).get(name):
            search_params[name] = max(1, round(factor * value))
    if "nprobe" in search_params:
        search_params["nprobe"] = min(search_params["nprobe"], lists)
    return replace(params, **search_params)


def _between(fast: SearchParams, balanced: SearchParams) -> list[SearchParams]:
    """The geometric mean of two efforts, where it differs from both."""
    first, last = asdict(fast), asdict(balanced)
    search_params: dict[str, Any] = {"k_factor": math.sqrt(fast.k_factor * balanced.k_factor)}
    for name in ("nprobe", "efSearch", "quantizer_efSearch"):
        if first.get(name):
            search_params[name] = round(math.sqrt(first[name] * last[name]))
    return [replace(balanced, **search_params)]
