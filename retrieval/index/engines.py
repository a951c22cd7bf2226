"""The interface of an engine: a codec that is trained once, and segments that are written once.

A *codec* holds what all segments share: centroids, codebooks, ranges. A *segment* holds the vectors of some documents, which it knows only
by their rows 0 to P - 1. An engine knows nothing of ids, stores or manifests: its caller provides folders, a `Disk` to write through, and
a bitmap of the rows that may be found. `quiver.retrieval.index.engine_table` lists the engines by name.

Every engine keeps these rules:
    - scores are the model's similarity as exactly as the segment stores it, on one scale for all segments of a codec, so that hits of
      several segments can be merged by score;
    - a row is found at most once; a row that is not allowed or has no vector is never found, and no row is below 0;
    - if fewer than k rows can be found, all of them are;
    - ties go to the greater rank (see ``ranks`` below), so that a ranking does not depend on how documents are spread over segments;
    - equal input and seed give equal bytes.

Shapes: Q queries, P documents (rows) of a segment, T vectors of all its documents, n_i vectors of text i, d width, k hits.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.disk import Disk
from quiver.retrieval.index.mapped import Files

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
"""(Q, d) float32 for dense vectors; a list of Q arrays (n_i, d) float32 for token vectors."""

SearchParams = TypeVar("SearchParams", contravariant=True)
"""Search parameters of an engine: a frozen dataclass whose fields are numbers or booleans."""

SegmentType = TypeVar("SegmentType")
"""The engine's segments."""

ParamsType = TypeVar("ParamsType", covariant=True)
"""The engine's efforts."""


@dataclass(frozen=True)
class Found:
    """Hits of one segment for one query.

    Attributes:
        rows: Rows of the segment, best first, (n,) with n <= k.
        scores: Their scores, (n,).
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """Training data of a codec: the vectors of documents chosen at random.

    Attributes:
        vectors: (n, d) float32, document after document.
        lengths: How many of them each of the m documents has, (m,); None for one vector a document.
        token_ids: The vocabulary's number of each vector's token, (n,) uint32; None where the model does not say.
    """

    vectors: NDArray[np.float32]
    lengths: NDArray[np.int64] | None = None
    token_ids: NDArray[np.uint32] | None = None


class Size(NamedTuple):
    """Size of a segment in bytes.

    Attributes:
        resident: Read into memory when it is opened, for as long as it is open.
        mapped: Left in files that are mapped; the system keeps in memory what is used.
    """

    resident: int
    mapped: int


class SegmentWriter(Protocol):
    """Writes one segment as a stream; it holds at most ``Codec.memory`` bytes."""

    def add(
        self, vectors: NDArray[np.float32], lengths: NDArray[np.int64] | None = None, token_ids: NDArray[np.uint32] | None = None
    ) -> None:
        """Append documents, which get the next rows.

        Args:
            vectors: (n, d) float32, comparable by inner product, document after document; not kept and not changed.
            lengths: For one vector a token how many each of the m documents has, (m,), zero allowed; n in all.
            token_ids: The vocabulary's numbers of the tokens, (n,); None where the model does not say.
        """

    def close(self) -> Mapping[str, str]:
        """Finish the files; file name -> what it holds. They are written through the disk, but need not be synced.

        A writer that is not closed leaves files behind that whoever made the folder removes.
        """


class Segment(Protocol[Queries, SearchParams]):
    """The vectors of some documents, opened for searching. Several threads may search at once."""

    def __len__(self) -> int:
        """Number of rows P, those without a vector included."""

    @property
    def size(self) -> Size:
        """Size in memory and on disk."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Vectors of each row, (P,); all 1 for dense vectors."""

    def search(
        self, queries: Queries, k: int, *, params: SearchParams, ranks: NDArray[np.uint32], allowed: Bitmap | None = None
    ) -> list[Found]:
        """The k best rows of each query.

        Args:
            queries: Finite and of the codec's width; (Q, d), or Q arrays of (n_i >= 1, d).
            k: At least 1; may exceed the number of rows.
            params: Search parameters, as the codec's ``preset_params`` or ``search_params_from`` returns them.
            ranks: The rank of each row's document id among the ids of the segment, ascending, (P,): ties go to the greater. It may be
                mapped, and is looked at only where scores are equal.
            allowed: The rows that may be found, (P,); None for all. With exhaustive parameters the result is that of brute
                force over these rows.

        Returns:
            Q results.
        """

    def exact_scores(self, query: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Scores of some rows by the best vectors that the segment keeps, for re-ranking and calibration.

        Args:
            query: One query, (d,), or for one vector a token (n, d).
            rows: Rows of the segment in any order, (n,).

        Returns:
            (n,); minus infinity for a row without a vector.
        """

    def vectors(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The best vectors that the segment keeps of some rows, for explaining a score.

        Returns:
            (n, d) vectors, row after row in the order given, and how many each row has, (len(rows),).
        """

    def damaged(self) -> Bitmap:
        """The rows whose vectors a salvaged file has lost, (P,)."""


class Codec(Protocol[SegmentType, ParamsType]):
    """What is trained once; all segments of an index are written and read with the same codec."""

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
        """Write the codec into an existing, empty folder; file name -> what it holds. Equal codecs give equal bytes."""

    def memory(self, rows: int, vectors: int) -> int:
        """Bytes that writing or merging a segment of so many rows and vectors holds at most, the vectors given to ``add`` left out."""

    def writer(self, folder: Path, disk: Disk) -> SegmentWriter:
        """Begin a segment in an existing folder, whose other files are none of the engine's business."""

    def open(self, files: Files, rows: int) -> SegmentType:
        """Open a segment; large arrays stay mapped and are verified as they are read.

        Args:
            files: What a writer or ``merge`` wrote.
            rows: Number of rows it must have.

        Raises:
            FileNotFoundError: A file is missing: a writer may have removed an old state in this moment, and the reader tries the newer.
            InputError: A file does not fit the others or the codec.
        """

    def merge(self, parts: Sequence[tuple[SegmentType, Bitmap]], folder: Path, disk: Disk) -> Mapping[str, str]:
        """Write one segment from the rows of others that are kept, in order; nothing is encoded again.

        Args:
            parts: Segments of this codec, each with the rows to keep; one row at least is kept in all.
            folder: An existing folder.
            disk: Writes.

        Returns:
            File name -> what it holds; the bytes are those that a writer would have written of the same documents.
        """

    def preset_params(self, preset: Preset, *, k: int) -> ParamsType:
        """Search parameters of a preset for k hits, for an index without calibration; ``exact`` searches exhaustively."""

    def param_grid(self, k: int, *, documents: int) -> Sequence[ParamsType]:
        """The parameter grid for k hits, from cheap to exhaustive, without duplicates: the presets are among the points, ``exact`` is last.

        Args:
            k: Hits.
            documents: Documents of the largest segment: the last points before ``exact`` visit nearly all of them.
        """

    def resized(self, search_params: Mapping[str, Setting], *, measured: int, k: int) -> Mapping[str, Setting]:
        """Search parameters that visit as much of the index for k hits as the given ones do for ``measured`` hits."""

    def search_params_from(self, search_params: Mapping[str, Setting]) -> ParamsType:
        """Search parameters from names and values, as in a manifest or on a command line.

        Missing parameters have the value of the uncalibrated ``balanced``.

        Raises:
            InputError: A search parameter does not exist or its value is invalid.
        """


AnyCodec: TypeAlias = Codec[Any, Any]
"""A codec of dense or token vectors, with its own search parameters."""

AnySegment: TypeAlias = Segment[Any, Any]
"""A segment of either kind of vectors."""


def check_preset(effort: str | Mapping[str, Setting]) -> None:
    """Refuse a search effort that is neither a preset nor search parameters by name.

    Raises:
        InputError: It is another string.
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
    """Settings as `parse_settings` reads them.

    Example:
        >>> format_settings({"nprobe": 8, "exhaustive": True})
        'nprobe=8,exhaustive=true'
    """
    return ",".join(
        f"{name}={str(value).lower() if isinstance(value, bool) or value is None else value}" for name, value in settings.items()
    )


def check_names(subject: str, what: str, given: Collection[str], known: Sequence[str]) -> None:
    """Refuse names that an engine does not have, with the closest one that it has.

    Args:
        subject: Owner of the names, such as an engine.
        what: Type of the names: ``setting`` or ``search parameter``.
        given: Names to check.
        known: All valid names.

    Raises:
        InputError: A name is unknown.
    """
    for name in given:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"{subject} has no {what} {name!r}{did_you_mean(name, known)}; {has}")


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the closest known one, or nothing if none is close.

    Example:
        >>> did_you_mean("nlst", ["nlist", "bits"]), did_you_mean("x", ["nlist", "bits"])
        (" (did you mean 'nlist'?)", '')
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


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
