"""An opened index: the segments of one committed generation, searched as one.

A segment is a document table and the vectors of an engine, row by row. Engines handle only rows and vectors; the document table handles
only rows, ids, texts and metadata. Hits of segments, or of shards in other processes, have comparable scores of one codec, and no document
is in two segments: the overall ranking is the k best of all parts, ordered by score and then by document id, both descending.

An opened index never changes, whatever is added, deleted or compacted in its folder; open it again to see changes.

Shapes: P documents, Q queries, k hits, n_i token vectors of text i, d vector width.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast, get_args, overload

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.display import html_table
from quiver.retrieval.index.columns import LOOK, arrow_type
from quiver.retrieval.index.documents import OpenSegment, SegmentHits, merged, open_segment, shared_ids
from quiver.retrieval.index.engines import (
    AnyCodec,
    Bitmap,
    Preset,
    Setting,
    check_k,
    check_preset,
    did_you_mean,
    find_engine,
    named_params,
    open_codec,
    parse_params,
    resize_params,
)
from quiver.retrieval.index.files import COPY, DamagedIndexError, missing_file
from quiver.retrieval.index.filters import Facet, Filter, FilterLike, as_filter, count_values
from quiver.retrieval.index.recall_table import Calibration, GridPoint, check_target
from quiver.retrieval.index.store.reading import (
    Layout,
    Manifest,
    SegmentEntry,
    open_files,
    open_newest,
    read_alive,
    read_generation,
    verify_files,
)
from quiver.retrieval.index.words import WordQueries, WordSegment
from quiver.retrieval.models.encoding import comparable
from quiver.retrieval.records import (
    DenseEncoding,
    DenseModel,
    DenseVectors,
    Document,
    Hits,
    ModelCard,
    QueryHits,
    TokenEncoding,
    TokenModel,
    TokenVectors,
)

if TYPE_CHECKING:
    import torch


Effort: TypeAlias = str | Mapping[str, Setting] | None
"""Effort of a search: a preset, or search parameters by name; None for ``balanced``."""

TextsOrVectors: TypeAlias = Sequence[str] | Sequence[ArrayLike] | NDArray[Any]
"""Q queries: texts, vectors, or words."""

Row = TypeVar("Row")

logger = logging.getLogger(__name__)

_PRESETS: tuple[Preset, ...] = get_args(Preset)
# Number of filters whose matching rows are cached, so that a stream of queries with one filter evaluates it once.
_FILTERS = 4


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search; see `IndexReader.search`."""

    filter: FilterLike = None
    effort: Effort = None
    target_recall: float | None = None


@dataclass(frozen=True)
class SearchRequest:
    """The checked arguments of a search; any subset of the index's segments can answer it.

    Attributes:
        queries: Queries as `dense_queries` or `token_queries` returns them, or `quiver.retrieval.index.words.WordQueries`.
        k: Hits per query, at least 1.
        params: Search parameters of the engine.
        filter: Condition that hits must meet; None for no condition.
    """

    queries: Any
    k: int
    params: Any
    filter: Filter | None


def dense_queries(queries: ArrayLike, dim: int) -> DenseVectors:
    """Check dense queries, (Q, dim), and return them as a contiguous float32 matrix.

    Raises:
        InputError: A value is not finite or overflows float32; names the query's number, from 0.
        ValueError: The shape is wrong.
    """
    given: NDArray[Any] = np.asarray(queries)
    if given.ndim != 2 or given.shape[1] != dim:
        raise ValueError(f"queries must have the shape (Q, {dim}), got {given.shape}")
    matrix = _to_float32(given)
    finite = np.isfinite(matrix)
    if not finite.all():
        raise InputError(f"the vector of query {int(finite.all(axis=1).argmin())} is not finite: it has NaN or infinity")
    return matrix


def token_queries(queries: Sequence[ArrayLike], dim: int) -> list[TokenVectors]:
    """Check token queries and return them as contiguous float32 matrices, Q arrays of (n_i, dim), n_i >= 1.

    Raises:
        InputError: A value is not finite or overflows float32; names the query's number, from 0.
        ValueError: A query is empty or has a wrong shape.
    """
    checked = []
    for row, query in enumerate(queries):
        given: NDArray[Any] = np.asarray(query)
        if given.ndim != 2 or not len(given) or given.shape[1] != dim:
            raise ValueError(f"query {row} must have the shape (>= 1, {dim}), got {given.shape}")
        matrix = _to_float32(given)
        if not np.isfinite(matrix).all():
            raise InputError(f"a vector of query {row} is not finite: it has NaN or infinity")
        checked.append(matrix)
    return checked


def encoded_queries(encoding: DenseEncoding | TokenEncoding, card: ModelCard) -> Sequence[Any] | DenseVectors:
    """Return encoded queries in the form that `IndexReader.search` takes: vectors whose inner product is the similarity; words for BM25."""
    if isinstance(encoding, DenseEncoding):
        return comparable(encoding.vectors, card)
    return encoding.vectors if card.kind == "colbert" else encoding.token_ids or []


def _to_float32(matrix: NDArray[Any]) -> NDArray[np.float32]:
    """Convert to contiguous float32, without a copy if possible."""
    if matrix.dtype == np.float32:
        return np.ascontiguousarray(matrix)
    with np.errstate(over="ignore"):  # an overflow becomes infinity, which the caller rejects
        return np.ascontiguousarray(matrix, np.float32)


class Place(NamedTuple):
    """Position of a document: the number of its segment and its row there."""

    segment: int
    row: int


class LiveRows(Sequence[Row]):
    """What ``read`` gives for the documents that are not deleted, in the order in which they were added; read on access."""

    def __init__(self, segments: Sequence[OpenSegment], read: Callable[[OpenSegment, int], Row]) -> None:
        self._segments, self._read = segments, read
        self._rows = [None if segment.alive is None else np.flatnonzero(segment.alive) for segment in segments]
        counts = (len(segment.documents if rows is None else rows) for segment, rows in zip(segments, self._rows, strict=True))
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __repr__(self) -> str:
        return f"<{len(self):,} documents>"

    def __iter__(self) -> Iterator[Row]:
        for number, rows in enumerate(self._rows):
            for row in range(len(self._segments[number].documents)) if rows is None else rows.tolist():
                yield self.at(Place(number, row))

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"the document number must be below {len(self)}, got {index}")
        number = bisect_right(self._ends, index % len(self))
        row, rows = index % len(self) - (self._ends[number - 1] if number else 0), self._rows[number]
        return self.at(Place(number, row if rows is None else int(rows[row])))

    def at(self, place: Place) -> Row:
        """That of the document at a position."""
        return self._read(self._segments[place.segment], place.row)


def _read_document(segment: OpenSegment, row: int) -> Document:
    if segment.documents.texts is None:
        raise ValueError("this segment was opened without its texts")
    return segment.documents.texts[row]


class IndexReader:
    """An opened generation of an index, which answers queries that are vectors, words, or texts that its model encodes.

    `quiver.retrieval.search.index.Index` adds fusion, re-ranking, explanations and changes.

    Attributes:
        path: Folder of the index.
        manifest: What the index is and holds.
        codec: What its segments share.
        segments: Its segments, in the order in which documents were added.
        verified: Whether blocks of its files are compared with their checksums when they are first read.
        schema: Types of the fields that filters can test.
        matching: Cached function from a filter to the bitmap of matching rows of each segment; None instead of a bitmap if all rows match.

    Example:
        >>> from quiver import build_index
        >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
        >>> index = build_index(rows, "sentence-transformers/all-MiniLM-L6-v2")
        >>> len(index), index.kind, list(index.fields)
        (2, 'exact-dense', ['year'])
    """

    def __init__(self, path: Path, manifest: Manifest, codec: AnyCodec, segments: Sequence[OpenSegment], *, verified: bool = True) -> None:
        self.path = path
        self.verified = verified
        self.manifest = manifest
        self.codec = codec
        self.segments = tuple(segments)
        self.schema = pa.schema({field: arrow_type(kind) for field, kind in manifest.policy.types.items()})
        # Not a cached method: it would form a reference cycle and keep deleted files mapped until the next garbage collection.
        remembered = lru_cache(maxsize=_FILTERS)(partial(_allowed_rows, self.segments, self.schema))
        self.matching: Callable[[Filter], tuple[Bitmap | None, ...]] = remembered
        self._model: DenseModel | TokenModel | None = None
        self._parsed_presets: dict[tuple[str, int], Any] = {}
        self._facets: dict[tuple[str, int], Facet] = {}

    @property
    def fields(self) -> Mapping[str, str]:
        """Fields that filters can test, each with the type of its values.

        Example:
            >>> from quiver import build_index
            >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
            >>> index = build_index(rows, "bm25")
            >>> dict(index.fields)
            {'year': 'integer'}
        """
        return self.manifest.policy.types

    @property
    def kind(self) -> str:
        """Name of the engine, such as ``exact-dense``.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> index.kind
            'bm25'
        """
        return self.manifest.codec.engine

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order they were added.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> list(index.ids)
            ['1', '2']
        """
        return LiveRows(self.segments, lambda segment, row: segment.documents.ids.strings[row])

    @property
    def nbytes(self) -> int:
        """Size of the searched vectors in bytes, without documents.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "sentence-transformers/all-MiniLM-L6-v2")
            >>> index.nbytes  # 2 vectors of 384 float32
            3072
        """
        return sum(sum(segment.vectors.size) for segment in self.segments)

    @property
    def parameters(self) -> Mapping[str, Setting]:
        """Settings of the engine, for reports.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> index.parameters["k1"], index.parameters["b"]
            (0.9, 0.4)
        """
        return self.codec.parameters

    @cached_property
    def calibration(self) -> Calibration | None:
        """Measured recall and latency; None without calibration.

        Raises:
            InputError: The calibration was stored by a Quiver version with another format.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> index.calibration is None
            True
        """
        content = self.manifest.calibration
        return None if content is None else Calibration.from_json(content)

    def __len__(self) -> int:
        return self.manifest.documents

    def __repr__(self) -> str:
        return f"Index({'; '.join(f'{name}: {value}' for name, value in self._list_facts())})"

    def _repr_html_(self) -> str:
        """Table for notebooks."""
        return html_table(("Index", ""), self._list_facts())

    def _list_facts(self) -> list[tuple[str, str]]:
        """Facts for people: name and value."""
        model, described = self.manifest.model, [("path", str(self.path)), ("documents", f"{len(self):,}")]
        vectors = "" if model.kind == "bm25" else f", {model.dim} dimensions, {model.similarity}"
        described += [("engine", self.kind), ("model", f"{model.source or '(made of parts)'}{vectors}")]
        return [*described, ("fields", ", ".join(self.fields))] if self.fields else described

    @property
    def model(self) -> DenseModel | TokenModel:
        """The model that encodes texts given to `search`: the one that built the index, or was set; loaded at its first use.

        Raises:
            InputError: It cannot be loaded, or the model set is another one.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "sentence-transformers/all-MiniLM-L6-v2")
            >>> index.model.dim
            384
        """
        if self._model is None:
            from quiver.retrieval.models.loading import load_index_model

            try:
                loaded = load_index_model(self.manifest.model)
                self.check_model(loaded.card)
            except InputError as error:
                raise InputError(f"{error}; set index.model to the model if it has moved") from error
            self._model = loaded
        return self._model

    @model.setter
    def model(self, model: DenseModel | TokenModel) -> None:
        self.check_model(model.card)
        self._model = model

    def search_on(self, device: torch.device) -> IndexReader:
        """Search on a device from now on, and return the index.

        The exact engines search on a GPU if it is given; the rankings are the same there. The other engines search on the CPU, with FAISS.

        Args:
            device: Usually the device of the model that encodes the queries.

        Example:
            >>> import torch
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "sentence-transformers/all-MiniLM-L6-v2")
            >>> index.search_on(torch.device("cpu")) is index
            True
        """
        from quiver.retrieval.index.exact import move_search  # imports PyTorch

        chosen = move_search([segment.vectors for segment in self.segments], device)
        if device.type != "cpu":
            logger.info("%s: the engine %s searches on %s", self.path, self.kind, chosen)
        return self

    @overload
    def search(  # type: ignore[overload-overlap]  # a str is a sequence of str, too
        self, queries: str, k: int = 10, *, filter: FilterLike = None, effort: Effort = None, target_recall: float | None = None
    ) -> QueryHits: ...
    @overload
    def search(
        self, queries: TextsOrVectors, k: int = 10, *, filter: FilterLike = None, effort: Effort = None, target_recall: float | None = None
    ) -> Hits: ...
    def search(
        self, queries: Any, k: int = 10, *, filter: FilterLike = None, effort: Effort = None, target_recall: float | None = None
    ) -> Hits | QueryHits:
        """The k best documents of each query; ties go to the greater id.

        Args, results and errors as `quiver.retrieval.search.index.Index.search`.
        """
        if not hasattr(queries, "__len__"):
            raise InputError(f"a text, a list of texts or vectors are searched for, got {queries!r}")
        texts = [queries] if isinstance(queries, str) else queries
        hits = self.answer(self.request(self._encode_queries(texts), k, SearchOptions(filter, effort, target_recall)))
        hits = replace(hits, document=self._document_or_none)
        return hits[0] if isinstance(queries, str) else hits

    def _encode_queries(self, queries: Any) -> Any:
        """Encode queries that are texts; others are vectors, or words, already."""
        if not (isinstance(queries, Sequence) and queries and isinstance(queries[0], str)):
            return queries
        return encoded_queries(self.model.encode_texts(list(queries), "query"), self.manifest.model)

    def _document_or_none(self, key: str) -> Document | None:
        """A document; None if the index stores no texts."""
        return self.document(key) if self.manifest.policy.store_text else None

    def request(self, queries: Any, k: int, options: SearchOptions) -> SearchRequest:
        """The checked arguments of `search`, with the chosen search parameters; raises as `search`.

        :meta private:
        """
        k = check_k(k)
        vectors, effort = self._convert_queries(queries), options.effort
        if options.target_recall is not None:
            if effort is not None:
                raise ValueError("give either effort or target_recall, not both")
            effort = self.search_params_for(options.target_recall, k)
        chosen = self.check_filter(options.filter)
        return SearchRequest(vectors, k, self._parse_effort("balanced" if effort is None else effort, k), chosen)

    def answer(self, request: SearchRequest) -> Hits:
        """Search the segments of this index. The request is not checked again; an index with more segments may have checked it.

        :meta private:
        """
        queries, k = request.queries, request.k
        bitmaps = [segment.alive for segment in self.segments] if request.filter is None else self.matching(request.filter)
        found = []
        for segment, allowed in zip(self.segments, bitmaps, strict=True):
            if allowed is None or allowed.any():
                ranks = segment.documents.ids.ranks
                results = segment.vectors.search(queries, k, params=request.params, ranks=ranks, allowed=allowed)
                found.append((segment.documents.ids.strings, results))
        return merged([[SegmentHits(strings, results[query]) for strings, results in found] for query in range(len(queries))], k)

    def search_params_for(self, target_recall: float, k: int) -> Mapping[str, Setting]:
        """The fastest measured search parameters whose 95% interval of recall lies above a target.

        Args:
            target_recall: Share of the exact top k that a search finds, averaged over queries, in (0, 1]. The exact top k are those of the
                index's own ``exact`` search.
            k: Hits per query. If k was not measured, the next larger measured number is used and the parameters are scaled to k.

        Returns:
            Search parameters by name; those of exhaustive search if no others reach the target. Empty for an exact engine.

        Raises:
            InputError: The index is not calibrated, or not for so many hits.
            ValueError: The target is not in (0, 1].

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> index.search_params_for(0.95, k=10)  # an exact engine has none
            {}
        """
        check_target(target_recall)
        k = check_k(k)
        param_grid = self.codec.param_grid(k, documents=1)
        if len(param_grid) == 1:
            return named_params(param_grid[0])
        if self.calibration is None:
            raise InputError(f"{self.path}: recall was not measured; run quiver index calibrate")
        wanted = max(1, min(k, len(self)))
        measured, point = self.calibration.choose(target_recall, wanted)
        return resize_params(point.search_params, measured=measured, k=k)

    def presets(self, k: int = 10) -> Mapping[Preset, Mapping[str, Setting]]:
        """Search parameters of the presets for k hits.

        ``exact`` searches exhaustively. In a calibrated index, ``balanced`` is the fastest grid point with a recall of at least 0.95 and
        ``fast`` the fastest with at least 0.90 (`quiver.retrieval.index.recall_table.RecallTable.preset`). Without calibration the
        parameters depend on the size of the index. For a larger k than was measured, each parameter is the maximum of that default and of
        the preset for the largest measured k.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> dict(index.presets())
            {'exact': {}, 'balanced': {}, 'fast': {}}
        """
        k = check_k(k)
        return {name: self._preset(name, k) for name in _PRESETS}

    def search_params(self, effort: str | Mapping[str, Setting], k: int) -> Mapping[str, Setting]:
        """All search parameters that `search` uses for k hits.

        Args:
            effort: A preset, or search parameters by name.
            k: Number of hits.

        Raises:
            InputError: The preset or search parameter does not exist.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> index.search_params("fast", k=10)
            {}
        """
        return named_params(self._parse_effort(effort, check_k(k)))

    def preset_recall(self) -> Mapping[int, Mapping[Preset, GridPoint]]:
        """Measured recall and latency of the presets by number of hits; empty without calibration.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> dict(index.preset_recall())
            {}
        """
        tables = () if self._measured is None else self._measured.tables
        return {table.k: {name: table.preset(name) for name in _PRESETS} for table in tables}

    def locate(self, ids: Sequence[str]) -> list[Place | None]:
        """Position of each document; None for an unknown id.

        :meta private:
        """
        places: list[Place | None] = [None] * len(ids)
        for number, segment in enumerate(self.segments):
            rows = segment.rows_of(ids)
            for which in np.flatnonzero(rows >= 0).tolist():
                places[which] = Place(number, int(rows[which]))
        return places

    def shared_documents(self, other: IndexReader) -> int:
        """Number of documents of this index whose ids also occur in another index, without deleted documents.

        :meta private:
        """
        mine, theirs = ([(segment.documents.ids, segment.kept) for segment in each.segments] for each in (self, other))
        return sum(shared_ids(one, another) for one in mine for another in theirs)

    def scores(self, query: NDArray[np.float32] | Sequence[str], ids: Sequence[str]) -> NDArray[np.float32]:
        """Scores of given documents, computed from the most precise stored vectors, (len(ids),).

        Args:
            query: One query: (d,) for a dense index, (n, d) for token vectors, words for BM25.
            ids: Document ids.

        Raises:
            InputError: A document does not exist.
            ValueError: The query is not finite or has a wrong width.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> index.scores(["wings"], ["1", "2"]).argmax().item()
            0
        """
        vectors = self._convert_queries([query])[0]
        scores = np.empty(len(ids), np.float32)
        places = [self._require_place(key, place) for key, place in zip(ids, self.locate(ids), strict=True)]
        for number, segment in enumerate(self.segments):
            mine = [which for which, place in enumerate(places) if place.segment == number]
            if mine:
                scores[mine] = segment.vectors.exact_scores(vectors, np.array([places[which].row for which in mine], np.int64))
        return scores

    def document(self, key: str) -> Document:
        """A document in the form in which it was added.

        Raises:
            InputError: The document does not exist, or the index was built without texts.

        Example:
            >>> from quiver import build_index
            >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
            >>> index = build_index(rows, "bm25")
            >>> index.document("owl")
            Document(id='owl', text='Owls have wings.', title='', metadata={'year': 2012})
        """
        return self.documents.at(self._require_place(key, self.locate([key])[0]))

    def text_of(self, key: str) -> str:
        """The text of a document as the model encoded it, with its title if the index uses titles.

        Raises:
            InputError: The document does not exist, or the index was built without texts.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> index.text_of("1")
            'Owls have wings.'
        """
        return self.document(key).content(use_title=self.manifest.policy.use_title)

    @property
    def documents(self) -> LiveRows[Document]:
        """All documents in the order they were added, read on access.

        Raises:
            InputError: The index was built without texts.

        Example:
            >>> from quiver import build_index
            >>> index = build_index(["Owls have wings.", "Trout have fins."], "bm25")
            >>> [document.text for document in index.documents]
            ['Owls have wings.', 'Trout have fins.']
        """
        if not self.manifest.policy.store_text:
            raise InputError(f"{self.path}: the index was built without texts; build it with texts to show documents")
        return LiveRows(self.segments, _read_document)

    def check_filter(self, filter: FilterLike) -> Filter | None:
        """Parse a filter and check it against the types of the fields.

        Raises:
            InputError: The filter is malformed, no document has one of its fields (names the fields that exist), or one is compared with a
                value of another type.

        Example:
            >>> from quiver import InputError, build_index
            >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
            >>> index = build_index(rows, "bm25")
            >>> try:
            ...     index.check_filter("colour = 'red'")
            ... except InputError as error:
            ...     print(str(error).partition(": ")[2])
            no document has the field 'colour' to filter by; there are year (integer)
        """
        chosen = None if filter is None else as_filter(filter)
        if chosen is not None and self.segments:
            chosen.check(self.schema)
        return chosen

    def count(self, filter: FilterLike = None) -> int:
        """Number of documents that match a filter.

        Raises:
            InputError: The filter is malformed, or names a field that no document has.

        Example:
            >>> from quiver import build_index
            >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
            >>> index = build_index(rows, "bm25")
            >>> index.count("year >= 2010")
            1
        """
        chosen = self.check_filter(filter)
        if chosen is None:
            return len(self)
        bitmaps = self.matching(chosen)
        sizes = [len(segment.documents) for segment in self.segments]
        return sum(size if rows is None else int(np.count_nonzero(rows)) for size, rows in zip(sizes, bitmaps, strict=True))

    def ids_matching(self, filter: FilterLike) -> list[str]:
        """Ids of the documents that match a filter, in the order they were added.

        Raises:
            InputError: The filter is malformed, or names a field that no document has.

        :meta private:
        """
        chosen, found = self.check_filter(filter), list[str]()
        bitmaps = [segment.alive for segment in self.segments] if chosen is None else self.matching(chosen)
        for segment, rows in zip(self.segments, bitmaps, strict=True):
            found += segment.documents.ids.strings.take(np.arange(len(segment.documents)) if rows is None else np.flatnonzero(rows))
        return found

    def facets(self, fields: Sequence[str], *, filter: FilterLike = None, most: int = 20) -> dict[str, Facet]:
        """Count the values of fields over all documents that match a filter, whatever a query ranks first.

        Args:
            fields: Names of fields.
            filter: Filter on the documents, see `search`; None for all documents.
            most: Maximum number of values per field.

        Raises:
            InputError: The filter is malformed, or it or ``fields`` names a field that no document has.
            DamagedIndexError: The metadata is damaged.

        Example:
            >>> from quiver import build_index
            >>> rows = [{"id": "owl", "text": "Owls have wings.", "year": 2012}, {"id": "trout", "text": "Trout have fins.", "year": 2008}]
            >>> index = build_index(rows, "bm25")
            >>> index.facets(["year"])
            {'year': Facet(values=[(2008, 1), (2012, 1)], distinct=2, range=(2008, 2012))}
        """
        chosen, fields = self.check_filter(filter), [fields] if isinstance(fields, str) else fields
        for field in fields:
            if field not in self.fields:
                there = f"there are {', '.join(self.fields)}" if self.fields else "they have none"
                raise InputError(f"{self.path}: no document has the field '{field}' to count{did_you_mean(field, self.fields)}; {there}")
        known = self._facets if chosen is None else {}  # the documents of an open index do not change
        if wanted := [field for field in fields if (field, most) not in known]:
            bitmaps = [segment.alive for segment in self.segments] if chosen is None else self.matching(chosen)
            tables = [(segment.documents.columns, rows) for segment, rows in zip(self.segments, bitmaps, strict=True)]
            for field in wanted:
                known[field, most] = count_values(field, tables, most=most)
        return {field: replace(known[field, most], values=list(known[field, most].values)) for field in fields}

    def check_model(self, card: ModelCard) -> None:
        """Check that a model is the one that built the index.

        Raises:
            InputError: The fingerprints of the models differ; names both models.

        :meta private:
        """
        check_model(self.path, self.manifest, card)

    def _require_place(self, key: str, place: Place | None) -> Place:
        if place is None:
            raise InputError(f"{self.path}: the index has no document '{key}'")
        return place

    def _convert_queries(self, queries: Any) -> Any:
        """Check queries and convert them for the engine."""
        card = self.manifest.model
        if card.kind == "bm25":
            return WordQueries.of(queries, ((cast(WordSegment, segment.vectors), segment.alive) for segment in self.segments))
        return dense_queries(queries, card.dim) if card.kind == "dense" else token_queries(queries, card.dim)

    def _parse_effort(self, effort: str | Mapping[str, Setting], k: int) -> Any:
        """Convert a search effort to search parameters of the engine."""
        if not isinstance(effort, str):
            return parse_params(self.codec, effort)
        found = self._parsed_presets.get((effort, k))
        if found is None:
            check_preset(effort)
            found = self._parsed_presets[effort, k] = parse_params(self.codec, self._preset(cast("Preset", effort), k))
        return found

    def _preset(self, name: Preset, k: int) -> Mapping[str, Setting]:
        """Search parameters of a preset; see `presets`."""
        usual: dict[str, Any] = named_params(self.codec.preset_params(name, k=k))
        if self._measured is None or name == "exact":
            return usual
        table = self._measured.table(max(1, min(k, len(self))))
        if table is not None:
            return resize_params(table.preset(name).search_params, measured=table.k, k=k)
        most = self._measured.tables[-1].preset(name).search_params
        return {parameter: max(value, most.get(parameter, value)) for parameter, value in usual.items()}  # numbers and truth values

    @cached_property
    def _measured(self) -> Calibration | None:
        """The calibration that presets are chosen from; None if there is none or this version cannot use it."""
        try:
            calibration = self.calibration
            for table in () if calibration is None else calibration.tables:
                for point in table.points:
                    parse_params(self.codec, point.search_params)
        except InputError as error:
            logger.warning("%s: the calibration is ignored, presets depend on the size of the index: %s", self.path, error)
            return None
        return calibration


def open_index(path: Path | str, *, generation: int | None = None, verify: bool = True) -> IndexReader:
    """Open one generation of an index for reading; arguments and errors as `quiver.retrieval.search.index.open_index`."""
    layout = Layout(Path(path).resolve())
    if generation is None:
        return open_newest(layout, lambda manifest: open_manifest(layout, manifest, verify=verify))
    manifest = read_generation(layout, generation)
    try:
        return open_manifest(layout, manifest, verify=verify)
    except FileNotFoundError as error:
        raise missing_file(Path(error.filename)) from error


def open_manifest(layout: Layout, manifest: Manifest, *, verify: bool = True) -> IndexReader:
    """Open a generation whose manifest has been read, or of it the segments that a changed manifest has; see `open_index`."""
    codec = open_checked_codec(layout, manifest)
    segments = [_open_one_segment(layout, manifest, codec, entry, verify=verify) for entry in manifest.segments]
    return IndexReader(layout.root, manifest, codec, segments, verified=verify)


def open_checked_codec(layout: Layout, manifest: Manifest) -> AnyCodec:
    """Verify the files of a generation's codec and open it; raises DamagedIndexError, also if it does not fit the manifest's model."""
    folder = layout.codecs / manifest.codec.name
    verify_files(folder, {name: entry for name, entry in manifest.codec.files.items() if name != COPY}, full=True)
    codec = open_codec(manifest.codec.engine, folder)
    # Queries are checked against the manifest's model only, and the kernels rely on the codec's width.
    if (find_engine(manifest.codec.engine).kind, codec.dim) != (manifest.model.kind, manifest.model.dim):
        raise DamagedIndexError(f"{folder}: not a codec for {manifest.model.kind} vectors of width {manifest.model.dim}; {LOOK}")
    return codec


def check_has_vectors(index: IndexReader, action: str) -> None:
    """Check that an index has vectors, for an action in the imperative; raises InputError for an index of BM25."""
    if index.manifest.model.kind == "bm25":
        raise InputError(f"{index.path}: an index of BM25 has no vectors to {action}")


def check_model(path: Path, manifest: Manifest, card: ModelCard) -> None:
    """Check that a model is the one that built an index; raises InputError that names both if their fingerprints differ."""
    built = manifest.model
    if card.fingerprint != built.fingerprint and card.source == built.source and card.dtype != built.dtype:
        raise InputError(
            f"{path}: built with {built.source} in {built.dtype}, but the model given is in {card.dtype}; "
            f"load it with dtype={built.dtype!r}"
        )
    if card.fingerprint != built.fingerprint:
        raise InputError(
            f"{path}: built with {built.source} ({built.fingerprint[:12]}), but the model given is {card.source} "
            f"({card.fingerprint[:12]}); search with the model that built it, or build it again"
        )


def _open_one_segment(layout: Layout, manifest: Manifest, codec: AnyCodec, entry: SegmentEntry, *, verify: bool) -> OpenSegment:
    folder = layout.segments / entry.name
    files = open_files(folder, entry.files, verify=verify)
    segment = open_segment(files, codec, entry.documents, manifest.policy, alive=read_alive(layout, entry))
    if len(segment.vectors) != entry.documents:
        raise DamagedIndexError(f"{folder}: {len(segment.vectors)} rows where the manifest has {entry.documents}; run quiver index repair")
    return segment


def _allowed_rows(segments: Sequence[OpenSegment], schema: pa.Schema, filter: Filter) -> tuple[Bitmap | None, ...]:
    """Bitmap of the rows of each segment that match a filter; None if all rows match."""
    bitmaps = [filter.rows(segment.documents.columns, schema) & segment.kept for segment in segments]
    return tuple(None if rows.all() else rows for rows in bitmaps)
