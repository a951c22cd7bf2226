"""Records and protocols: the values that the packages of retrieval pass to each other, and the interfaces between them.

Shapes: Q queries, k hits per query, B texts, n rows, d vector width, n_i token vectors of text i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance
from quiver.retrieval.display import html_table, text_table
from quiver.retrieval.options import Dtype as Dtype
from quiver.retrieval.options import SourceOptions as SourceOptions

Qrels: TypeAlias = Mapping[str, Mapping[str, int]]
"""Judgements: query id -> document id -> grade (0 means judged and not relevant)."""

Run: TypeAlias = Mapping[str, Mapping[str, float]]
"""A ranking: query id -> document id -> score, ordered by score, then document id, both descending, as in trec_eval."""

DenseVectors: TypeAlias = NDArray[np.float32]
"""One vector per text, (B, d)."""

TokenVectors: TypeAlias = NDArray[np.float32]
"""Vectors of one text's tokens, (n_i, d)."""

Value: TypeAlias = str | int | float | bool
"""A value of a document's metadata."""

Metadata: TypeAlias = Mapping[str, Value | Sequence[Value]]
"""Metadata of a document: field -> value, or list of values."""

Role: TypeAlias = Literal["query", "document"]
"""Role of a text in a search; decides prompt, length and expansion."""

PLURALS: Mapping[Role, str] = {"query": "queries", "document": "documents"}
"""Role -> what a progress bar calls its texts."""


class Document(NamedTuple):
    """A document. Filters test its metadata, which are not encoded.

    Example:
        >>> from quiver import Document
        >>> Document("owl", "has wings", "An owl", {"year": 2012}).title
        'An owl'
    """

    id: str
    text: str
    title: str = ""
    metadata: Metadata | None = None

    def content(self, *, use_title: bool = True) -> str:
        """Return the text to encode: title and text joined by one space, as in BEIR, or, as in CoIR, only the text.

        Example:
            >>> from quiver import Document
            >>> Document("d1", "has wings", "A bird").content()
            'A bird has wings'
        """
        return f"{self.title} {self.text}".strip() if use_title else self.text.strip()


class Query(NamedTuple):
    """A query."""

    id: str
    text: str


class Missing(NamedTuple):
    """Part of an index that a search over several machines did not reach: names of segments, and the number of their documents."""

    segments: tuple[str, ...]
    documents: int


@dataclass(frozen=True)
class Group:
    """The passages of one document, by the value of a field, among the hits of a query: passage id -> score, best first, at least one."""

    key: str
    passages: Mapping[str, float]

    @property
    def best(self) -> str:
        """Id of the best passage."""
        return next(iter(self.passages))

    @property
    def score(self) -> float:
        """Score of the best passage."""
        return next(iter(self.passages.values()))


class Hit(NamedTuple):
    """A document that was found, with its metadata; in a search with ``group_by``, the best passage of a group.

    Attributes:
        text: Its text; None if the index stores no texts.
        group: Value of the field that hits are grouped by; None without ``group_by``.
        passages: Passages of the group that were found: id -> score, best first; empty without ``group_by``.

    Example:
        >>> from quiver.retrieval.records import Hit
        >>> hit = Hit("owl", 0.91, "Owls have wings.", fields={"year": 2012})
        >>> hit.fields["year"]
        2012
    """

    id: str
    score: float
    text: str | None = None
    title: str = ""
    fields: Metadata = MappingProxyType({})
    group: str | None = None
    passages: Mapping[str, float] = MappingProxyType({})


_NARROW = 24  # characters of a hit's group, title and fields in a table, which leave room for its text


class QueryHits(Sequence[Hit]):
    """Documents found for one query, best first; shown as a table.

    Example:
        >>> from quiver.retrieval.records import Hit, QueryHits
        >>> QueryHits([Hit("owl", 0.91, "Owls have wings."), Hit("trout", 0.12, "Trout have fins.", "Fish", {"year": 2008})])
        rank  id     score   title  fields     text
        1     owl    0.9100                    Owls have wings.
        2     trout  0.1200  Fish   year=2008  Trout have fins.
    """

    def __init__(self, hits: Sequence[Hit]) -> None:
        self._hits = tuple(hits)

    def __len__(self) -> int:
        return len(self._hits)

    @overload
    def __getitem__(self, number: int) -> Hit: ...
    @overload
    def __getitem__(self, number: slice) -> QueryHits: ...
    def __getitem__(self, number: int | slice) -> Hit | QueryHits:
        return QueryHits(self._hits[number]) if isinstance(number, slice) else self._hits[number]

    def __repr__(self) -> str:
        return text_table(*self._table(), limits=dict.fromkeys(("group", "title", "fields"), _NARROW)) if self._hits else "no hits"

    def _repr_html_(self) -> str:
        """Table for notebooks."""
        return html_table(*self._table())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        rows = [
            [
                str(rank),
                hit.id,
                f"{hit.score:.4f}",
                hit.group or "",
                str(len(hit.passages) or ""),
                hit.title,
                ", ".join(f"{name}={value}" for name, value in hit.fields.items()),
                hit.text or "",
            ]
            for rank, hit in enumerate(self._hits, start=1)
        ]
        header = ["rank", "id", "score", "group", "passages", "title", "fields", "text"]
        shown = [
            column for column, name in enumerate(header) if name in ("rank", "id", "score", "text") or any(row[column] for row in rows)
        ]
        return [header[column] for column in shown], [[row[column] for column in shown] for row in rows]


@dataclass(frozen=True)
class TokenCounts:
    """Number of texts, of their tokens after truncation, special tokens included, of truncated and of blank texts."""

    texts: int
    tokens: int
    truncated: int
    empty: int


NOT_ENCODED = TokenCounts(0, 0, 0, 0)
"""Token counts of a search that encodes no query."""


@dataclass(frozen=True, repr=False)
class Hits:
    """Documents found for each query, best first.

    Attributes:
        ids: Document ids, Q lists of at most k.
        scores: Scores of these documents, Q float32 arrays; of a fusion float64.
        missing: Part of the index that was not searched; None if all of it was.
        document: Function from an id to the document, for ``hits[query]``; None if texts are not at hand.
        groups: The groups of each query, whose best passages ``ids`` holds; None without ``group_by``.
        counts: Token counts of the queries; zeros where none was encoded.
        lists: Name of each fused ranking -> its hits; empty without fusion.
        candidates: The hits before re-ranking; None without re-ranking.
        efforts: Name of each ranking of an index -> search parameters that were used.
        seconds: Wall-clock time of each stage: ``encode``, ``search``, ``fuse``, ``rerank``.

    Example:
        >>> import numpy as np
        >>> from quiver.retrieval.records import Hits
        >>> hits = Hits([["owl"], []], [np.array([0.5], np.float32), np.array([], np.float32)])
        >>> hits[0][0].id, len(hits[1])
        ('owl', 0)
    """

    ids: Sequence[Sequence[str]]
    scores: Sequence[NDArray[np.floating[Any]]]
    missing: Missing | None = None
    document: Callable[[str], Document | None] | None = field(default=None, compare=False)
    groups: Sequence[Sequence[Group]] | None = None
    counts: TokenCounts = field(default=NOT_ENCODED, compare=False)
    lists: Mapping[str, Hits] = field(default_factory=dict, compare=False)
    candidates: Hits | None = field(default=None, compare=False)
    efforts: Mapping[str, Mapping[str, str | int | float | bool | None]] = field(default_factory=dict, compare=False)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, rankings: Iterable[Mapping[str, float]]) -> Hits:
        """Make hits of rankings: document id -> score, best first.

        Example:
            >>> from quiver.retrieval.records import Hits
            >>> Hits.of([{"owl": 0.5}]).ids
            [['owl']]
        """
        given = list(rankings)
        return cls([list(each) for each in given], [np.fromiter(each.values(), np.float64, len(each)) for each in given])

    def __len__(self) -> int:
        return len(self.ids)

    def ranking(self, query: int) -> dict[str, float]:
        """The documents found for a query, by its position: id -> score, best first.

        :meta private:
        """
        return dict(zip(self.ids[query], self.scores[query].tolist(), strict=True))

    def part(self, queries: slice) -> Hits:
        """The hits of some of the queries; token counts and times stay those of all.

        :meta private:
        """
        return replace(
            self,
            ids=self.ids[queries],
            scores=self.scores[queries],
            groups=None if self.groups is None else self.groups[queries],
            lists={name: hits.part(queries) for name, hits in self.lists.items()},
            candidates=None if self.candidates is None else self.candidates.part(queries),
        )

    def __getitem__(self, query: int) -> QueryHits:
        """The documents found for a query, by its position, with their texts."""
        hits = []
        for key, score in zip(self.ids[query], self.scores[query], strict=True):
            document = None if self.document is None else self.document(key)
            if document is None:
                hits.append(Hit(key, float(score)))
            else:
                hits.append(Hit(key, float(score), document.text, document.title, document.metadata or {}))
        if self.groups is not None:
            hits = [hit._replace(group=group.key, passages=group.passages) for hit, group in zip(hits, self.groups[query], strict=True)]
        return QueryHits(hits)

    def __repr__(self) -> str:
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        """Table for notebooks."""
        return html_table(*self._table())

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """The best three documents of each query, of at most 20 queries."""
        rows = [
            [str(query), str(len(ids)), ", ".join(f"{key} ({score:.4f})" for key, score in zip(ids[:3], scores[:3], strict=True))]
            for query, (ids, scores) in enumerate(zip(self.ids[:20], self.scores[:20], strict=True))
        ]
        rest = len(self.ids) - len(rows)
        return ["query", "hits", "best"], rows + [["...", "", f"{rest} more queries"]] * (rest > 0)

    @property
    def partial(self) -> bool:
        """Whether part of the index was not searched.

        Example:
            >>> from quiver.retrieval.records import Hits
            >>> Hits([], []).partial
            False
        """
        return self.missing is not None

    def to_run(self, query_ids: Sequence[str]) -> dict[str, dict[str, float]]:
        """Convert the hits to a run, by Q ids in the order of the queries; an InputError if an id is repeated.

        Example:
            >>> import numpy as np
            >>> from quiver.retrieval.records import Hits
            >>> Hits([["owl"]], [np.array([0.5], np.float32)]).to_run(["q1"])
            {'q1': {'owl': 0.5}}
        """
        if len(query_ids) != len(self.ids):
            raise ValueError(f"got {len(query_ids)} query ids for the hits of {len(self.ids)} queries")
        run = {query: self.ranking(row) for row, query in enumerate(query_ids)}
        if len(run) < len(query_ids):
            key, times = Counter(query_ids).most_common(1)[0]
            raise InputError(f"query id '{key}' occurs {times} times; ids must be unique")
        return run


@dataclass(frozen=True)
class ModelCard:
    """Facts about a model for indexes and reports."""

    source: str  # folder or Hub id that the model was loaded from
    kind: Literal["dense", "colbert", "bm25"]  # one vector per text, one per token, or words
    fingerprint: str  # sha256 over weights, tokenizer and settings: equal fingerprints mean equal vectors
    dim: int  # vector width d
    similarity: Literal["cosine", "dot", "maxsim", "bm25"]
    query_length: int  # maximum tokens of a query, special tokens included
    document_length: int  # the same of a document
    query_prompt: str = ""  # text or token put before every query
    document_prompt: str = ""  # the same for documents
    dtype: Dtype = "float32"  # of the encoder's weights; the fingerprint depends on it
    library: Literal["quiver", "sentence-transformers", "pylate"] = "quiver"  # library that runs the model


@dataclass(frozen=True)
class TextTokens:
    """Token counts of B texts after truncation, special tokens included; whether each was truncated, and whether it is blank; each (B,)."""

    tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    empty: NDArray[np.bool_]

    def total(self) -> TokenCounts:
        """Sum the counts."""
        return TokenCounts(len(self.tokens), int(self.tokens.sum()), int(self.truncated.sum()), int(self.empty.sum()))


@dataclass(frozen=True)
class DenseEncoding:
    """One vector per text, (B, d), and token counts."""

    vectors: DenseVectors
    tokens: TextTokens

    @property
    def counts(self) -> TokenCounts:
        """Token counts of all texts."""
        return self.tokens.total()


@dataclass(frozen=True)
class TokenEncoding:
    """Token vectors, B arrays of (n_i, d), token counts, and if known the tokens' ids (for BM25 the words), B arrays of (n_i,)."""

    vectors: list[TokenVectors]
    tokens: TextTokens
    token_ids: list[NDArray[Any]] | None = None

    @property
    def counts(self) -> TokenCounts:
        """Token counts of all texts."""
        return self.tokens.total()


class DenseModel(Protocol):
    """A text encoder with one vector per text."""

    @property
    def card(self) -> ModelCard:
        """Facts about the model for indexes and reports."""

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        """Encode texts to (B, d) float32, in input order."""


class TokenModel(Protocol):
    """A text encoder with one vector per token."""

    @property
    def card(self) -> ModelCard:
        """Facts about the model for indexes and reports."""

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Encode texts to B arrays of (n_i, d) float32, in input order."""


class Rows(Protocol):
    """Vectors in memory or on disk, (n, d) float32. The returned arrays may be views and must not be modified."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows n and width d."""

    def span(self, start: int, stop: int) -> DenseVectors:
        """Return the rows ``start`` to ``stop - 1``, or to the last one."""

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """Return rows by number, in the order given."""


def row_blocks(rows: Rows, size: int) -> Iterator[tuple[int, DenseVectors]]:
    """Yield all rows in order in blocks of ``size``, each with the number of its first row."""
    for start in range(0, rows.shape[0], size):
        yield start, rows.span(start, start + size)


class MatrixRows:
    """Rows of a matrix, (n, d) float32, in memory or memory-mapped."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows n and width d."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def span(self, start: int, stop: int) -> DenseVectors:
        """See `Rows`; a view, not a copy."""
        rows: DenseVectors = self.matrix[start:stop]
        return rows

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """See `Rows`."""
        taken: DenseVectors = self.matrix[indices]
        return taken


class PickedRows:
    """A selection of other rows (n, d) by their numbers, (m,); nothing is read before it is requested."""

    def __init__(self, rows: Rows, picked: NDArray[np.intp]) -> None:
        self._rows = rows
        self._picked = picked

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows m and width d."""
        return len(self._picked), self._rows.shape[1]

    def span(self, start: int, stop: int) -> DenseVectors:
        """See `Rows`."""
        return self._rows.take(self._picked[start:stop])

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """See `Rows`."""
        return self._rows.take(self._picked[indices])


# An item of work and its result: small and picklable, since they may be sent to another process.
Item = TypeVar("Item")
ItemIn = TypeVar("ItemIn", contravariant=True)
Result = TypeVar("Result")
ResultOut = TypeVar("ResultOut", covariant=True)


class WorkerTask(Protocol[ItemIn, ResultOut]):
    """Work on items. A remote executor pickles the task for its workers."""

    def open(self, advance: Advance) -> Callable[[ItemIn], ResultOut]:
        """Load what all items need, such as a model, and return the function for one item; an InputError ends the run.

        Called once per worker. The function calls ``advance`` with the number of steps since the last call.
        """


class Executor(Protocol):
    """Runs a task on items in any order, on one worker or many, and returns the result of each item once.

    If a worker dies, or seems dead, its item is assigned again: what an item writes must be safe to write twice.
    """

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def remote(self) -> bool:
        """Whether tasks run in other processes, which share only files with this one."""

    def threads(self, here: int) -> int:
        """Threads per worker, given that this process uses ``here``."""

    def run(
        self,
        task: WorkerTask[Item, Result],
        items: Iterable[Item],
        *,
        threads: int = 1,
        advance: Advance = lambda steps: None,
    ) -> Generator[tuple[Item, Result], None, None]:
        """Run all items and yield results as they complete, in any order. Workers end when the iterator ends or is closed.

        Items are consumed as workers become free. Each worker reserves ``threads``; the task itself sets how many it uses. ``advance`` is
        called with the steps that the tasks report; the steps of a failed attempt are taken back.

        Raises:
            InputError: An item, or opening the task, failed because of a mistake of the user.
            WorkerError: An item failed on several workers, or no worker stays alive.
        """


class InProcess:
    """Executor that runs items in this process, in order; errors are raised unchanged."""

    name = "local"
    remote = False

    def threads(self, here: int) -> int:
        """Return all threads of this process."""
        return here

    def run(
        self,
        task: WorkerTask[Item, Result],
        items: Iterable[Item],
        *,
        threads: int = 1,
        advance: Advance = lambda steps: None,
    ) -> Generator[tuple[Item, Result], None, None]:
        """See `Executor`."""
        del threads
        work = None
        for item in items:
            work = work or task.open(advance)
            yield item, work(item)


IN_PROCESS = InProcess()
"""The default executor."""


def short_names(paths: Sequence[str]) -> list[str]:
    """Names of indexes and models in tables: the last part of each path, with as many before it as tell it from the other paths.

    ``model``, the folder of a training run's model, tells nothing without the one before it.

    Example:
        >>> short_names(["indexes/dense", "bm25"]), short_names(["/x/a/dense", "/x/b/dense", "runs/code/model"])
        (['dense', 'bm25'], ['a/dense', 'b/dense', 'code/model'])
    """
    parts = {path: (Path(path) if Path(path).name else Path(path).resolve()).parts for path in paths}
    names = []
    for path, own in parts.items():
        others = [each for other, each in parts.items() if other != path]
        ends = (own[-count:] for count in range(min(2, len(own)) if own[-1] == "model" else 1, len(own) + 1))
        found = next((end for end in ends if all(each[-len(end) :] != end for each in others)), None)
        names.append(path if found is None else Path(*found).as_posix())
    return [dict(zip(parts, names, strict=True))[path] for path in paths]
