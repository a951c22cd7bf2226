"""What is measured: indexes with their settings, each searched at one or more points.

A *system* is built once. A *point* is a set of knobs that its search is run with, so that a system is a curve of recall over latency.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.results import OWN
from quiver.retrieval.index.engine_table import parse_engine
from quiver.retrieval.index.engines import Setting, format_settings, parse_effort

Kind = Literal["dense", "colbert"]

DEFAULT = "default"
"""Name of the point at which a peer is searched as its authors have set it."""


@dataclass(frozen=True)
class Point:
    """One way of searching a system.

    Attributes:
        name: In tables.
        knobs: Given to the library; for Quiver ``preset`` alone is one of its presets.
        allowed: How many documents, drawn at random (`eval.bench.index.vectors.drawn`), a filter inside the search lets it find; None for
            all. For Quiver alone.
    """

    name: str
    knobs: Mapping[str, Setting] = field(default_factory=dict)
    allowed: int | None = None


@dataclass(frozen=True)
class System:
    """One index.

    Attributes:
        name: In tables, and how a command line names it.
        library: A key of ``LIBRARIES``.
        settings: Of the build.
        points: How it is searched.
    """

    name: str
    library: str
    settings: Mapping[str, Setting]
    points: tuple[Point, ...]

    @property
    def engine(self) -> str:
        """What stands before the settings in its name."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Library:
    """Where an index comes from.

    Attributes:
        kinds: What it indexes.
        modules: What must be there to import.
        install: What gives that.
        imports: Modules that are imported before a clock starts.
        packages: Distributions whose versions are recorded.
        points: Of a system of it, where they do not depend on settings.
    """

    kinds: tuple[Kind, ...]
    modules: tuple[str, ...]
    install: str
    imports: tuple[str, ...]
    packages: tuple[str, ...]
    points: tuple[Point, ...] = ()


def _points(default: Mapping[str, Setting], *changes: Mapping[str, Setting]) -> tuple[Point, ...]:
    """The library's default and some changes to it, named by what is changed; each sets every knob, for libraries keep what was set."""
    return (Point(DEFAULT, default), *(Point(format_settings(each), {**default, **each}) for each in changes))


LIBRARIES: Mapping[str, Library] = {
    OWN: Library(("dense", "colbert"), (), "quiver-retrieval", (), ("quiver-retrieval", "faiss-cpu", "numba")),
    "faiss": Library(("dense",), ("faiss",), "faiss-cpu", ("faiss",), ("faiss-cpu",)),
    "hnswlib": Library(("dense",), ("hnswlib",), "hnswlib", ("hnswlib",), ("hnswlib",), _points({"ef": 10}, {"ef": 64}, {"ef": 256})),
    "usearch": Library(
        ("dense",),
        ("usearch",),
        "usearch",
        ("usearch.index",),
        ("usearch",),
        _points({"expansion_search": 64}, {"expansion_search": 256}),
    ),
    "fast-plaid": Library(
        ("colbert",),
        ("fast_plaid",),
        "fast-plaid",
        ("fast_plaid.search",),
        ("fast-plaid", "torch"),
        # PyLate scores 8,192 documents in full by default, fast-plaid itself half as many; far fewer are faster.
        _points({"n_ivf_probe": 8, "n_full_scores": 4096}, {"n_full_scores": 256}, {"n_ivf_probe": 32, "n_full_scores": 8192}),
    ),
    "warp": Library(
        ("colbert",),
        ("xtr_warp", "pylate"),
        "'pylate[warp]'",
        ("pylate.indexes",),
        ("xtr-warp-rs", "pylate", "torch"),
        _points({"n_ivf_probe": 32}, {"n_ivf_probe": 128}),
    ),
    "voyager": Library(
        ("colbert",),
        ("voyager", "pylate"),
        # PyLate 1.6 gives it lists of vectors, which Voyager takes until 2.1.
        "'pylate[voyager]' 'voyager<2.2'",
        ("pylate.indexes", "pylate.retrieve"),
        ("voyager", "pylate", "torch"),
        _points({"ef_search": 200, "k_token": 100}, {"ef_search": 400, "k_token": 400}),
    ),
}
"""Name -> library; the first is this one, the others are its peers."""

PEERS = tuple(name for name in LIBRARIES if name != OWN)

NOT_COMPARED: Mapping[Kind, Mapping[str, str]] = {
    "dense": {},
    "colbert": {
        "colbert-ai": "compiles its own extension when it is first used and wants a GPU to index; fast-plaid is the same algorithm",
        "tachiom": "its wheel wants glibc 2.39, and its source a compiler and packages that are not on PyPI",
    },
}
"""What is left out of every run -> why."""


def unsupported_reason(library: str) -> str | None:
    """Why a library cannot be measured here; None if it can."""
    missing = [name for name in LIBRARIES[library].modules if importlib.util.find_spec(name) is None]
    return f"not installed: pip install {LIBRARIES[library].install}" if missing else None


def own_system(text: str, points: Sequence[Point]) -> System:
    """A system of Quiver from its engine and settings, as in ``ivf-tokens:bits=3`` or ``faiss-dense:factory=IVF64,Flat``.

    Args:
        text: As on a command line.
        points: How it is searched, unless it is an exact one.

    Raises:
        InputError: The engine or a setting is unknown or malformed.

    Example:
        >>> own_system("ivf-tokens:bits=3,pool_factor=2", own_points([])).settings
        {'bits': 3, 'pool_factor': 2}
    """
    engine = parse_engine(text)
    # Exact search has no knobs: its presets are one.
    chosen = (Point("exact", {"preset": "exact"}),) if engine.name.startswith("exact") else tuple(points)
    return System(text, OWN, engine.settings, chosen)


def own_points(texts: Sequence[str]) -> list[Point]:
    """Points of Quiver: presets, or knobs of an engine as in ``nprobe=8,candidates=50``; ``balanced`` where there are none.

    Raises:
        InputError: Neither.
    """
    points = []
    for text in dict.fromkeys(texts or ["balanced"]):
        effort = parse_effort(text)
        points.append(Point(text, {"preset": effort} if isinstance(effort, str) else effort))
    return points


def filtered(system: System, shares: Sequence[float], documents: int) -> System:
    """A system of Quiver whose points are searched again where only a share of the documents may be found.

    Args:
        system: The system.
        shares: Of the documents, each above 0 and below 1.
        documents: How many there are; one at least may be found.

    Raises:
        InputError: A share is none.

    Example:
        >>> some = filtered(own_system("pq-dense", own_points(["fast"])), [0.01], 2_000)
        >>> [(point.name, point.allowed) for point in some.points]
        [('fast', None), ('fast, 1% allowed', 20)]
    """
    wrong = [share for share in shares if not 0 < share < 1]
    if wrong:
        raise InputError(f"a share of the documents that may be found is above 0 and below 1, got {wrong[0]:g}")
    some = [
        replace(point, name=f"{point.name}, {100 * share:g}% allowed", allowed=max(1, round(share * documents)))
        for share in dict.fromkeys(shares)
        for point in system.points
    ]
    return replace(system, points=(*system.points, *some))


def default_peers(kind: Kind) -> list[str]:
    """All peers for a kind of vectors."""
    return [name for name in PEERS if kind in LIBRARIES[name].kinds]


def peer_systems(text: str, *, kind: Kind, documents: int, dim: int) -> list[System]:
    """The systems of a peer, by its name alone or, for FAISS, with a factory string, as in ``faiss:HNSW32``.

    Args:
        text: As on a command line.
        kind: Of the vectors.
        documents: How many there are; FAISS's usual index has lists for so many.
        dim: Width of the vectors.

    Raises:
        InputError: There is no such peer for this kind of vectors.
    """
    name, _, factory = text.partition(":")
    library = LIBRARIES.get(name)
    if library is None or name == OWN or kind not in library.kinds:
        known = ", ".join(each for each in PEERS if kind in LIBRARIES[each].kinds)
        raise InputError(f"unknown peer {name!r} for {kind} vectors; there are {known}")
    if name != "faiss":
        if factory:
            raise InputError(f"{text!r}: only faiss takes a factory string")
        return [System(name, name, {}, library.points)]
    chosen = [factory] if factory else factories(documents, dim)
    return [System(f"faiss:{each}", name, {"factory": each}, _faiss_points(each)) for each in chosen]


def factories(documents: int, dim: int) -> list[str]:
    """What a user of FAISS would build for so many vectors: exact, a graph, and product codes in lists with a refinement."""
    lists = 2 ** max(0, round(math.log2(4 * math.sqrt(documents))) - (1 if documents < 10_000 else 0))
    return ["Flat", "HNSW32", f"IVF{lists},PQ{dim // 2}x4fs,RFlat"]


def _faiss_points(factory: str) -> tuple[Point, ...]:
    """The library's default, and what raises the recall of an index of this make."""
    default: dict[str, Setting] = {"k_factor_rf": 1} if re.search(r"RFlat|Refine", factory) else {}
    refined: dict[str, Setting] = {"k_factor_rf": 10} if default else {}
    if "IVF" in factory:
        return _points({"nprobe": 1, **default}, {"nprobe": 8, **refined}, {"nprobe": 32, **refined})
    if "HNSW" in factory:
        return _points({"efSearch": 16}, {"efSearch": 64}, {"efSearch": 256})
    return _points(default, refined) if refined else _points(default)
