"""Index engines: their interface, the table of engines by name, and how engine names and settings are parsed.

A *codec* is trained once and holds the data that all segments share: centroids, codebooks, ranges. A *segment* is written once and holds
the vectors of some documents, which it identifies only by their rows 0 to P - 1. An engine has no access to ids, stores or manifests. To
add one, write a module with a dictionary ``ENGINES`` that holds an `Engine`, and name the module in `ENGINE_MODULES`.

Every engine keeps these rules:
    - scores are the model's similarity as exactly as the segment stores it, on one scale for all segments of a codec, so that hits of
      several segments can be merged by score;
    - a row is found at most once; a row that is not allowed or has no vector is never found, and no row is below 0;
    - if fewer than k rows can be found, all of them are; the engine ``bm25`` finds only rows that share a word with the query;
    - ties go to the greater rank (see ``ranks`` below), so that a ranking does not depend on how documents are spread over segments;
    - equal input and seed give equal bytes.

Shapes: Q queries, P documents (rows) of a segment, T vectors of all its documents, n_i vectors of text i, d width, k hits.
"""

from __future__ import annotations

import importlib
import operator
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, SupportsIndex, TypeAlias, TypeVar, get_args

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.schema import TextSchema, closest_name, parse_fields, parse_options
from quiver.retrieval.index.files import Disk, Files
from quiver.retrieval.records import ModelCard

if TYPE_CHECKING:
    import torch

Preset: TypeAlias = Literal["exact", "balanced", "fast"]
"""Search effort: how much of an index a search visits.

``exact`` searches exhaustively. In a calibrated index (`quiver.retrieval.index.calibration`), ``balanced`` is the fastest grid point with a
recall of at least 0.95, and ``fast`` the fastest with at least 0.90; see `RecallTable.preset`. Without calibration they depend on the size.
"""

Setting: TypeAlias = str | int | float | bool | None
"""Value of an engine setting or a search parameter, as in JSON and reports."""

Bitmap: TypeAlias = NDArray[np.bool_]
"""One boolean per row, (P,)."""

Queries = TypeVar("Queries", contravariant=True)
"""(Q, d) float32 for dense vectors; a list of Q arrays (n_i, d) float32 for token vectors; `quiver.retrieval.index.words.WordQueries`."""

SearchParams = TypeVar("SearchParams", contravariant=True)
"""Search parameters of an engine: a frozen dataclass whose fields are numbers or booleans."""

SegmentType = TypeVar("SegmentType")
"""Type of the engine's segments."""

ParamsType = TypeVar("ParamsType", covariant=True)
"""Type of the engine's search parameters."""

# Engines for one vector per document, for one vector per token, and for words.
EXACT_DENSE: str = "exact-dense"
PQ_DENSE: str = "pq-dense"
IVF_DENSE: str = "ivf-dense"
FAISS_DENSE: str = "faiss-dense"
EXACT_TOKENS: str = "exact-tokens"
IVF_TOKENS: str = "ivf-tokens"
WORDS: str = "bm25"

ENGINE_MODULES: dict[str, str] = {
    EXACT_DENSE: "quiver.retrieval.index.exact",
    EXACT_TOKENS: "quiver.retrieval.index.exact",
    PQ_DENSE: "quiver.retrieval.index.dense.codec",
    IVF_DENSE: "quiver.retrieval.index.dense.codec",
    FAISS_DENSE: "quiver.retrieval.index.dense.faiss_engine",
    IVF_TOKENS: "quiver.retrieval.index.tokens.codec",
    WORDS: "quiver.retrieval.index.words",
}
"""Engine name -> module whose ``ENGINES`` holds the `Engine`. The module is imported when the engine is first used."""

Settings = TypeVar("Settings", bound="EngineSettings")

AUTO = "auto"
"""Engine name that chooses an engine by the number of documents."""

EXACT = "exact"
"""Engine name that chooses the exact engine for the model's kind of vectors."""

TOKEN_WIDTH_MULTIPLE = 8
"""ivf-tokens stores vectors whose width is a multiple of this."""

# Limits in documents, measured on one thread of a Zen 4 with vectors of width 128. Up to 50,000 documents, an exact search takes about a
# millisecond; up to 500,000, a scan of all product codes takes less than that. Up to 1,000 documents (about 100,000 tokens), exact MaxSim
# takes no longer than an IVF search.
_MOST_EXACT, _MOST_SCANNED, _MOST_EXACT_TOKENS = 50_000, 500_000, 1_000

_clustering: ContextVar[torch.device | None] = ContextVar("device of clustering", default=None)

# FAISS's type stubs lack the functions that its Python layer adds.
_faiss: Any = faiss

Made = TypeVar("Made")


class Found(NamedTuple):
    """Hits of one segment for one query."""

    rows: NDArray[np.int64]  # rows of the segment, best first, (n,) with n <= k
    scores: NDArray[np.float32]  # their scores, (n,)


@dataclass(frozen=True)
class Sample:
    """Training data of a codec: the vectors of documents chosen at random.

    Attributes:
        vectors: (n, d) float32, document after document.
        lengths: Number of vectors of each of the m documents, (m,); None for one vector per document.
        token_ids: Vocabulary id of the token of each vector, (n,) uint32; None if the model does not provide them.
    """

    vectors: NDArray[np.float32]
    lengths: NDArray[np.int64] | None = None
    token_ids: NDArray[np.uint32] | None = None


class Size(NamedTuple):
    """Size of a segment in bytes."""

    resident: int  # bytes read into memory when the segment is opened
    mapped: int  # bytes in memory-mapped files; the operating system caches the parts in use


class SegmentWriter(Protocol):
    """Writes one segment as a stream, using at most ``Codec.memory`` bytes of memory."""

    def add(
        self, vectors: NDArray[np.float32], lengths: NDArray[np.int64] | None = None, token_ids: NDArray[np.uint32] | None = None
    ) -> None:
        """Append documents, which get the next rows.

        Args:
            vectors: (n, d) float32, comparable by inner product, document after document; not kept and not changed.
            lengths: For token vectors, the number of vectors of each of the m documents, (m,), zero allowed, with sum n.
            token_ids: Vocabulary ids of the tokens, (n,), or the words themselves for BM25; None if the model does not provide them.
        """

    def close(self) -> Mapping[str, str]:
        """Finish the files and return what each holds, by file name. They are written through the disk, but need not be synced.

        An unclosed writer leaves partial files, which the owner of the folder removes.
        """


class Segment(Protocol[Queries, SearchParams]):
    """The vectors of some documents, opened for searching. Several threads may search at once."""

    def __len__(self) -> int:
        """Number of rows P, including rows without a vector."""

    @property
    def size(self) -> Size:
        """Size in memory and on disk."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of vectors of each row, (P,); all 1 for dense vectors."""

    def search(
        self, queries: Queries, k: int, *, params: SearchParams, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """The k best rows of each query.

        Args:
            queries: Finite and of the codec's width; (Q, d), or Q arrays of (n_i >= 1, d).
            k: At least 1; may exceed the number of rows.
            params: Search parameters, as the codec's ``preset_params`` or `parse_params` returns them.
            ranks: Rank of each row's document id among the ids of the segment, ascending, (P,); among equal scores the greater rank is
                first. It may be memory-mapped and is read only for equal scores.
            allowed: The rows that may be found, (P,); None for all. With exhaustive parameters the result is that of brute
                force over these rows.

        Returns:
            One result per query.
        """

    def exact_scores(self, query: Any, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of given rows from the most precise vectors that the segment keeps, for re-ranking and calibration.

        Args:
            query: One query: (d,) for dense vectors, (n, d) for token vectors, `WordQueries` of one query for words.
            rows: Rows of the segment in any order, (n,).

        Returns:
            (n,); minus infinity for a row without a vector.
        """

    def vectors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The most precise vectors that the segment keeps of given rows, for explanations.

        Returns:
            Vectors (n, d), row after row in the order given, and the number of vectors of each row, (len(rows),).
        """

    def damaged(self) -> Bitmap:
        """Rows whose vectors were lost with a damaged file, (P,)."""


class Codec(Protocol[SegmentType, ParamsType]):
    """The trained part of an index; all its segments are written and read with the same codec."""

    @property
    def name(self) -> str:
        """Name of the engine in the table."""

    @property
    def dim(self) -> int:
        """Width d of the vectors."""

    @property
    def parameters(self) -> Mapping[str, Setting]:
        """Sizes and settings for reports."""

    def save(self, folder: Path, disk: Disk) -> Mapping[str, str]:
        """Write the codec into an existing, empty folder; return what each file holds, by name. Equal codecs give equal bytes."""

    def memory(self, rows: int, vectors: int) -> int:
        """Maximum memory in bytes for writing or merging a segment of this size, without the vectors passed to ``add``."""

    def writer(self, folder: Path, disk: Disk) -> SegmentWriter:
        """Begin a segment in an existing folder, which may contain other files."""

    def open(self, files: Files, rows: int) -> SegmentType:
        """Open a segment; large arrays stay mapped and are verified as they are read.

        Args:
            files: Files written by a segment writer or ``merge``.
            rows: Expected number of rows.

        Raises:
            FileNotFoundError: A file is missing. A writer may just have removed an old state; the reader then opens the newer one.
            InputError: A file does not fit the others or the codec.
        """

    def merge(self, parts: Sequence[tuple[SegmentType, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
        """Merge segments into one, keeping chosen rows in order; nothing is encoded again.

        Args:
            parts: Segments of this codec, each with the rows to keep; at least one row in all is kept.
            folder: An existing folder.
            disk: Performs all writes.

        Returns:
            What each file holds, by name. The bytes equal those that a writer would have written for the same documents.
        """

    def preset_params(self, preset: Preset, *, k: int) -> ParamsType:
        """Search parameters of a preset for k hits, for an index without calibration; ``exact`` searches exhaustively."""

    def param_grid(self, k: int, *, documents: int) -> Sequence[ParamsType]:
        """The parameter grid for k hits, from cheap to exhaustive, without duplicates: the presets are among the points, ``exact`` is last.

        Args:
            k: Number of hits.
            documents: Documents of the largest segment: the last points before ``exact`` visit nearly all of them.
        """


AnyCodec: TypeAlias = Codec[Any, Any]
"""A codec of dense or token vectors, with its own search parameters."""

AnySegment: TypeAlias = Segment[Any, Any]
"""A segment of either kind of vectors."""


def is_approximate(codec: AnyCodec) -> bool:
    """Whether the engine is approximate; an exact engine has nothing to calibrate."""
    return len(codec.param_grid(10, documents=1)) > 1


def check_preset(effort: str | Mapping[str, Setting]) -> None:
    """Check that a search effort is a preset or a mapping of search parameters.

    Raises:
        InputError: It is a string that names no preset.
    """
    names = get_args(Preset)
    if isinstance(effort, str) and effort not in names:
        choices = f"{', '.join(names)}, or search parameters such as nprobe=8"
        raise InputError(f"unknown search effort {effort!r}{did_you_mean(effort, names)}; choose {choices}")


def parse_effort(text: str) -> str | dict[str, Setting]:
    """Read a search effort: a preset, or search parameters as ``key=value,key=value``.

    Raises:
        InputError: It is neither.

    Example:
        >>> parse_effort("fast"), parse_effort("nprobe=8,k_factor=2.5")
        ('fast', {'nprobe': 8, 'k_factor': 2.5})
    """
    if "=" in text:
        return parse_settings(text)
    check_preset(text)
    return text


def parse_settings(text: str) -> dict[str, Setting]:
    """Read ``key=value,key=value``, the form of engine settings and search parameters on every command line.

    Numbers, ``true``, ``false`` and ``none`` become values of that type; everything else stays a string. A comma separates two settings
    only if ``key=`` follows it, because FAISS factory strings contain commas.

    Raises:
        InputError: A part has no key or no value, or a key is repeated.

    Example:
        >>> parse_settings("bits=4,factory=IVF64,Flat,pool=true")
        {'bits': 4, 'factory': 'IVF64,Flat', 'pool': True}
    """
    settings: dict[str, Setting] = {}
    for part in re.split(r",(?=[A-Za-z_]+=)", text) if text else []:
        name, _, value = part.partition("=")
        if not name or not value:
            raise InputError(f"{part!r} is not a setting; write key=value, several separated by commas")
        if name in settings:
            raise InputError(f"the setting {name!r} is given twice")
        settings[name] = _parsed_value(value)
    return settings


def format_settings(settings: Mapping[str, Setting]) -> str:
    """Format settings in the form that `parse_settings` reads.

    Example:
        >>> format_settings({"nprobe": 8, "exhaustive": True})
        'nprobe=8,exhaustive=true'
    """
    said = {name: str(value).lower() if isinstance(value, bool) or value is None else value for name, value in settings.items()}
    return ",".join(f"{name}={value}" for name, value in said.items())


def check_names(subject: str, what: str, given: Collection[str], known: Sequence[str]) -> None:
    """Check names of settings or search parameters; the error suggests the closest valid name."""
    for name in given:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"{subject} has no {what} {name!r}{did_you_mean(name, known)}; {has}")


def parse_params(codec: Codec[Any, ParamsType], search_params: Mapping[str, Setting]) -> ParamsType:
    """Search parameters from names and values, as in a manifest or on a command line.

    Missing parameters have the value of the uncalibrated ``balanced`` for ten hits. A number that is 0 there cannot be changed.

    Raises:
        InputError: A search parameter does not exist or its value is invalid.
    """
    params: Any = codec.preset_params("balanced", k=10)
    factory = codec.parameters.get("factory")
    subject = f"this {codec.name} index" if factory is None else f"this {codec.name} ({factory}) index"
    known = named_params(params)
    unchangeable = [name for name, value in search_params.items() if value != 0 or name not in vars(params)]
    check_names(subject, "search parameter", unchangeable, list(known))
    wanted = {name: value for name, value in search_params.items() if name in known}
    changed: ParamsType = replace(params, **parse_fields(type(params), wanted, source=subject)) if wanted else params
    return changed


def named_params(params: Any) -> dict[str, Setting]:
    """Search parameters by name, without those that are 0 because the index does not have them."""
    return {name: value for name, value in vars(params).items() if value != 0 or isinstance(value, bool)}


def resize_params(search_params: Mapping[str, Setting], *, measured: int, k: int) -> Mapping[str, Setting]:
    """Scale search parameters measured for ``measured`` hits to k hits: candidates per hit, so that there are as many in all.

    Example:
        >>> resize_params({"nprobe": 16, "k_factor": 5.0}, measured=100, k=20)
        {'nprobe': 16, 'k_factor': 25.0}
    """
    factor = search_params.get("k_factor")
    if factor is None:
        return search_params
    return {**search_params, "k_factor": max(1.0, float(factor or 1) * measured / k)}


@dataclass(frozen=True)
class NoParams:
    """Search parameters of an engine that has none."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Suffix for an error about an unknown name: the closest known name in any case, or an empty string if none is close.

    Example:
        >>> did_you_mean("nlst", ["nlist", "bits"]), did_you_mean("x", ["nlist", "bits"])
        (" (did you mean 'nlist'?)", '')
    """
    close = closest_name(name, known)
    return "" if close is None else f" (did you mean {close!r}?)"


def _parsed_value(text: str) -> Setting:
    words: dict[str, Setting] = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


class Train(Protocol):
    """Function that trains the codec of an engine."""

    def __call__(
        self, sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
    ) -> AnyCodec:
        """See `train_codec`."""


@dataclass(frozen=True)
class Engine:
    """One engine. The module of an engine lists it by name in ``ENGINES``; see `ENGINE_MODULES`.

    Attributes:
        kind: Kind of model that it indexes: ``dense`` (one vector per text), ``colbert`` (one per token) or ``bm25`` (words).
        train: Trains its codec.
        open: Opens a codec folder whose checksums have been verified.
        sample: Maximum number of training vectors, given the number of vectors in the index; by default 0, for engines without training.
        settings: Names of its settings.
        check: Validates settings against the model before anything is encoded.
    """

    kind: Literal["dense", "colbert", "bm25"]
    train: Train
    open: Callable[[Path], AnyCodec]
    sample: Callable[[int], int] = lambda vectors: 0
    settings: Sequence[str] = ()
    check: Callable[[Mapping[str, Setting], ModelCard], None] = lambda settings, card: None


class EngineSettings(TextSchema):
    """Base of the settings of an engine."""

    engine: ClassVar[str]

    @classmethod
    def parse(cls: type[Settings], settings: Mapping[str, Setting]) -> Settings:
        """Settings from names and values.

        Raises:
            InputError: A setting does not exist, is missing or has an invalid value.
        """
        check_names(cls.engine, "setting", settings, setting_names(cls))
        return parse_options(cls, settings, source=cls.engine)


def setting_names(settings: type[EngineSettings]) -> tuple[str, ...]:
    """Names of an engine's settings, for `Engine`."""
    return tuple(settings.model_fields)


def find_engine(name: str) -> Engine:
    """The engine with a given name, a key of `ENGINE_MODULES`; imports its module.

    Example:
        >>> find_engine("ivf-dense").settings
        ('dsub', 'bits', 'nlist')
    """
    found: Engine = importlib.import_module(ENGINE_MODULES[name]).ENGINES[name]
    return found


@dataclass(frozen=True)
class EngineSpec:
    """An engine with settings, as `parse_engine` reads it.

    Attributes:
        name: ``auto``, ``exact`` or a key of `ENGINE_MODULES`.
        settings: Settings that the user chose; the engine chooses the others from the size of the corpus.
    """

    name: str
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}:{format_settings(self.settings)}" if self.settings else self.name


def parse_engine(text: str) -> EngineSpec:
    """Read ``NAME`` or ``NAME:key=value,key=value``, the syntax of engines on the command line and in recipes.

    Args:
        text: ``auto``, ``exact``, or an engine by name, with settings where it has any.

    Raises:
        InputError: The engine or one of its settings is unknown (names the closest one), or a setting is malformed.

    Example:
        >>> from quiver.retrieval.index import parse_engine
        >>> parse_engine("ivf-dense:nlist=64,bits=16")
        EngineSpec(name='ivf-dense', settings={'nlist': 64, 'bits': 16})
        >>> str(parse_engine("faiss-dense:factory=IVF64,Flat"))
        'faiss-dense:factory=IVF64,Flat'
    """
    name, _, rest = text.partition(":")
    known = [AUTO, EXACT, *ENGINE_MODULES]
    if name not in known:
        raise InputError(f"unknown index engine {name!r}{did_you_mean(name, known)}; choose one of {', '.join(known)}")
    settings = parse_settings(rest)
    if name != AUTO:  # the settings of auto are checked when the engine is chosen
        check_names(name, "setting", settings, () if name == EXACT else find_engine(name).settings)
    return EngineSpec(name, settings)


def engine_name(name: str, card: ModelCard, documents: int) -> str:
    """Resolve ``auto`` and ``exact`` to an engine of the table."""
    if card.kind == "bm25":
        return WORDS if name in (AUTO, EXACT) else name
    if name == AUTO:
        if card.kind == "dense":
            return EXACT_DENSE if documents <= _MOST_EXACT else PQ_DENSE if documents <= _MOST_SCANNED else IVF_DENSE
        return EXACT_TOKENS if documents <= _MOST_EXACT_TOKENS or card.dim % TOKEN_WIDTH_MULTIPLE else IVF_TOKENS
    return {"dense": EXACT_DENSE, "colbert": EXACT_TOKENS}[card.kind] if name == EXACT else name


def engine(name: str, card: ModelCard) -> Engine:
    """Look up an engine for the vectors of a model.

    Raises:
        InputError: The engine does not exist or indexes the other kind of vectors; lists the engines for this model.
    """
    found = find_engine(name) if name in ENGINE_MODULES else None
    if found is None or found.kind != card.kind:
        known = ", ".join(key for key in ENGINE_MODULES if find_engine(key).kind == card.kind)
        raise InputError(f"index engine {name!r} does not exist for a {card.kind} model; choose one of {known}")
    return found


def check_engine(text: str, card: ModelCard) -> EngineSpec:
    """Parse an engine with settings and check that it fits a model, before anything is encoded.

    Raises:
        InputError: As `parse_engine`; or the engine, a setting or the vector width does not fit the model.
    """
    spec = parse_engine(text)
    if spec.name != AUTO:
        name = engine_name(spec.name, card, 0)
        engine(name, card).check(spec.settings, card)
    return spec


def train_codec(
    name: str, sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
) -> AnyCodec:
    """Train the codec of an engine.

    Args:
        name: Name of the engine.
        sample: Vectors of documents chosen at random; at least one vector.
        card: Card of the model that made them.
        documents: Expected number of documents of the index.
        vectors: Expected number of vectors of these documents.
        settings: Settings of the engine; the others are chosen from the sizes.
        seed: Random seed; equal input and seed give equal codecs.

    Raises:
        InputError: The engine or a setting does not exist, or the codec cannot be trained on this sample.
    """
    return engine(name, card).train(sample, card, documents=documents, vectors=vectors, settings=settings, seed=seed)


@contextmanager
def clustering_on(device: torch.device) -> Iterator[None]:
    """Within the block, train centroids of indexes and assign vectors to them on a device, if it is a GPU; FAISS does it on the CPU."""
    token = _clustering.set(None if device.type == "cpu" else device)
    try:
        yield
    finally:
        _clustering.reset(token)


def clustering_device() -> torch.device | None:
    """The device of `clustering_on`; None for the CPU."""
    return _clustering.get()


def open_codec(name: str, folder: Path) -> AnyCodec:
    """Open a codec folder written by ``Codec.save``; the caller has verified its checksums.

    Raises:
        InputError: The engine does not exist, or a file is missing or damaged.
    """
    if name not in ENGINE_MODULES:
        raise InputError(
            f"{folder}: made by the index engine {name!r}; this version of Quiver supports {', '.join(sorted(ENGINE_MODULES))}"
        )
    return find_engine(name).open(folder)


class one_thread:  # noqa: N801, a context as those of contextlib are named
    """Limit FAISS to one thread, because more threads make a single query slower; the previous number is restored on exit.

    A class, because every search enters it and a generator-based context manager takes three times as long (2.4 us).
    """

    __slots__ = ("_former",)

    def __enter__(self) -> None:
        self._former: int = _faiss.omp_get_max_threads()
        if self._former > 1:
            _faiss.omp_set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        if self._former > 1:
            _faiss.omp_set_num_threads(self._former)


class Lazy(Generic[Made]):
    """A value that is expensive to create: one thread creates it, the others wait.

    Since Python 3.12, ``functools.cached_property`` lets concurrent threads create the value several times. The factory is not stored: a
    bound method would form a reference cycle and keep the value alive until the next garbage collection.

    Example:
        >>> calls = []
        >>> once = Lazy()
        >>> once.get(lambda: calls.append("made")), once.get(lambda: calls.append("made again")), calls
        (None, None, ['made'])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[Made] = []

    def get(self, make: Callable[[], Made]) -> Made:
        """Return the value, creating it on first use; if creation fails, the next call tries again."""
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(make())
        return self._made[0]


def in_order(rows: NDArray[np.int64], scores: NDArray[np.float32], k: int, *, ids: NDArray[Any]) -> Found:
    """The k best rows by score and then by document id, both descending.

    Args:
        rows: Rows of the index.
        scores: Their scores; equal scores are ties.
        k: Maximum number of rows to return.
        ids: Document ids of all rows of the index, or their ranks.
    """
    if len(rows) > k:  # a tie at the cut stays complete
        kept = np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
        rows, scores = rows[kept], scores[kept]
    order = np.argsort(-scores, kind="stable")
    rows, scores = rows[order], scores[order]
    if (scores[:-1] == scores[1:]).any():
        named: list[tuple[float, Any, int]] = sorted(zip(scores.tolist(), ids[rows].tolist(), rows.tolist(), strict=True), reverse=True)
        rows = np.array([row for _, _, row in named], np.int64)
    return Found(rows[:k], scores[:k])


def check_k(k: SupportsIndex) -> int:
    """Convert the number of hits, such as a NumPy integer, to ``int``, which FAISS requires.

    Raises:
        TypeError: k is not an integer.
        ValueError: k < 1.
    """
    hits = operator.index(k)
    if hits < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    return hits
