"""The results of an evaluation: what was scored, how, and what came out; the fields of ``results.json``.

All measures are fractions at full precision; points and rounding are a report's business. This module knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from quiver.encoder.config import Precision
from quiver.encoder.errors import InputError
from quiver.eval.averages import Part, average, data_sets
from quiver.eval.provenance import Provenance
from quiver.retrieval.records import ModelCard

HEADLINE = "ndcg@10"
"""The measure that stands for a result."""

Parameter: TypeAlias = str | int | float | bool | None
"""A setting of an index or a baseline."""

Library: TypeAlias = Literal["quiver", "sentence-transformers", "pylate", "bm25s"]
"""What ran the system."""


@dataclass(frozen=True)
class System:
    """What was evaluated: the fields of a model card, None or empty where a system has no such thing.

    Attributes:
        source: Folder or hub id that the model was loaded from, or ``bm25``.
        kind: ``dense``, ``colbert`` or ``bm25``.
        library: What ran it.
        fingerprint: sha256 over weights, tokenizer and settings.
        dim: Width of a vector.
        similarity: ``cosine``, ``dot`` or ``maxsim``.
        query_length: Tokens a query is cut to, special tokens included.
        document_length: Tokens a document is cut to, special tokens included.
        query_prompt: Text put before every query.
        document_prompt: Text put before every document.
        precision: How the model's matrices were multiplied.
    """

    source: str
    kind: Literal["dense", "colbert", "bm25"]
    library: Library = "quiver"
    fingerprint: str | None = None
    dim: int | None = None
    similarity: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    precision: Precision = "float"

    @classmethod
    def of(cls, card: ModelCard) -> System:
        """The system of a model card."""
        return cls(**asdict(card))


@dataclass(frozen=True)
class FileReference:
    """A file beside ``results.json``.

    Attributes:
        file: Its path from the folder of results, with forward slashes.
        sha256: Checksum of its bytes.
    """

    file: str
    sha256: str


@dataclass(frozen=True)
class Truncated:
    """How many texts lost tokens because they were longer than the model reads.

    Attributes:
        documents: Documents cut.
        queries: Queries cut.
    """

    documents: int
    queries: int


@dataclass(frozen=True)
class IndexUsed:
    """The index a run came from.

    Attributes:
        kind: What it is: ``exact``, ``faiss`` or ``bm25``.
        parameters: Its settings; with ``k``, the documents it was asked for, where how well it searches depends on that.
        recall: Share of the documents an exact search finds that it finds too, ``overlap@10`` and ``overlap@100`` as far as
            so many are kept, means over the judged queries; None for BM25, 1 by definition for an exact index.
        bytes: Size of what is searched; None for BM25.
        query_milliseconds: Wall clock of the search without the encoding of the queries, a query, all of them searched in one call.
    """

    kind: str
    parameters: Mapping[str, Parameter]
    recall: Mapping[str, float] | None = None
    bytes: int | None = None
    query_milliseconds: float | None = None


@dataclass(frozen=True)
class Interval:
    """Bootstrap interval of a mean over queries.

    Attributes:
        low: Its lower end.
        high: Its upper end.
        level: Share of the resamples inside, such as 0.95.
        resamples: Resamples drawn.
    """

    low: float
    high: float
    level: float
    resamples: int


@dataclass(frozen=True)
class TokenMatch:
    """What one token of a query met in a document: a term of MaxSim's sum.

    Attributes:
        query_token: The token as text.
        document_token: The token of the document with the highest similarity, as text.
        similarity: Theirs, -1 to 1.
    """

    query_token: str
    document_token: str
    similarity: float


@dataclass(frozen=True)
class ShownDocument:
    """A document as a report shows it.

    Attributes:
        id: Its id.
        text: Its first characters, at most `SNIPPET`.
        grade: What the judges gave it; None where they did not judge it.
        rank: Where it was found, from 1; None where it is not among the documents kept.
        score: What it scored; None with ``rank``.
        matches: For a ColBERT, the query's tokens in order with what each met; empty otherwise.
    """

    id: str
    text: str
    grade: int | None
    rank: int | None
    score: float | None
    matches: tuple[TokenMatch, ...] = ()


SNIPPET = 400
"""Characters of a document that a report shows."""


@dataclass(frozen=True)
class WorstQuery:
    """One of the queries with the lowest nDCG@10.

    Attributes:
        query: Its id.
        text: Its text.
        score: Its nDCG@10.
        found: The documents found first, at most three, best first; empty where nothing was found.
        wanted: Relevant documents, at most three, the best grade first.
        relevant: How many documents are relevant.
    """

    query: str
    text: str
    score: float
    found: tuple[ShownDocument, ...]
    wanted: tuple[ShownDocument, ...]
    relevant: int


@dataclass(frozen=True)
class Baseline:
    """What a baseline scored on the same collection, under the same policy and cut.

    Attributes:
        name: ``bm25``.
        parameters: Its settings.
        measures: Measure -> mean over the judged queries.
        interval: Of its nDCG@10.
        run: Its TREC run; None when no folder was written.
        per_query: The scores of every query, as for the system; None when no folder was written.
    """

    name: str
    parameters: Mapping[str, Parameter]
    measures: Mapping[str, float]
    interval: Interval
    run: FileReference | None
    per_query: FileReference | None


@dataclass(frozen=True)
class CollectionResult:
    """What a system scored on one split of a collection, and how.

    Attributes:
        name: The collection, such as ``scifact`` or ``cqadupstack-android``.
        split: Its split.
        group: The data set that it is one of several parts of, such as ``cqadupstack``; None where it stands for itself.
        group_size: How many parts the group has; 1 without a group. The group's score is their unweighted mean, and it counts once.
        in_domain: Whoever evaluated says that the model was trained on this collection's training data; False is out of domain.
        licence: Of the data, as its publisher states it; None where that is not known.
        revision: Of the data: a commit, a version or a checksum of the archive; None for a local folder.
        documents: Documents searched, which is all of them.
        queries: Judged queries: the number that every mean is over.
        judgements: Judgements of the split, of any grade.
        use_title: Titles were part of the documents' text.
        exclude_self: A document with the query's own id was dropped before the cut.
        k: Documents kept for a query, at most.
        measures: Measure -> mean over the judged queries.
        interval: Of nDCG@10.
        judged: Share of the first ten documents that were judged, mean over the judged queries: where it is low, the score says
            little, for what nobody judged counts as wrong.
        unanswered: Judged queries for which nothing was found; each scores 0.
        truncated: Texts that were longer than the model reads.
        empty_texts: Documents without a text.
        index: What was searched.
        cached: Documents whose vectors were there already, from an earlier evaluation.
        seconds: Wall clock of ``encode_documents``, ``index``, ``encode_queries`` and ``search`` for a model, of ``search`` alone
            (indexing included) for BM25, of each baseline, of ``check``, reading and checking the data beforehand, and of ``other``:
            reading again, scoring, writing.
        run: The TREC run; None when no folder was written.
        per_query: The scores of every query, ``{query: {measure: value}}``; None when no folder was written.
        query_texts: The judged queries, ``{query: text}``; None when no folder was written.
        data_sha256: Checksum over documents, queries and judgements: equal checksums are the same data.
        worst: The queries with the lowest nDCG@10, at most ten, the worst first and equals by id.
        baselines: What the baselines scored.
    """

    name: str
    split: str
    group: str | None
    group_size: int
    in_domain: bool
    licence: str | None
    revision: str | None
    documents: int
    queries: int
    judgements: int
    use_title: bool
    exclude_self: bool
    k: int
    measures: Mapping[str, float]
    interval: Interval
    judged: float
    unanswered: int
    truncated: Truncated
    empty_texts: int
    index: IndexUsed
    cached: int
    seconds: Mapping[str, float]
    run: FileReference | None
    per_query: FileReference | None
    query_texts: FileReference | None
    data_sha256: str
    worst: tuple[WorstQuery, ...]
    baselines: tuple[Baseline, ...]

    @property
    def key(self) -> str:
        """The collection with its split, as files and tables name it: ``scifact.test``."""
        return f"{self.name}.{self.split}"

    def part(self, value: float | None = None) -> Part:
        """What ``quiver.eval.averages`` has to know of it.

        Args:
            value: The score that is averaged; None where only the grouping matters, or there is none.
        """
        return Part(self.name, self.split, self.group, self.group_size, value)


@dataclass(frozen=True)
class Results:
    """One system on one or more collections.

    Attributes:
        system: What was evaluated.
        collections: What it scored, in the order the collections were given in.
        provenance: Where and how.
    """

    system: System
    collections: tuple[CollectionResult, ...]
    provenance: Provenance

    @property
    def headline(self) -> float | None:
        """The mean nDCG@10 over the data sets, a group counting once; None if there are none, or a group lacks a part."""
        scores = data_sets(self.parts(HEADLINE))
        return average(scores, list(scores)).value

    def parts(self, measure: str) -> list[Part]:
        """What ``quiver.eval.averages`` has to know of the collections.

        Args:
            measure: Name of a measure; a collection that was not scored by it has no value.
        """
        return [each.part(each.measures.get(measure)) for each in self.collections]


def check_results(results: Results, where: str) -> None:
    """Check what the types of the fields cannot say, see `check_collection`, and that no collection is there twice.

    Args:
        results: As they were read.
        where: The file to name in errors.

    Raises:
        InputError: Something cannot be; names the first such field.
    """
    keys: set[str] = set()
    for place, collection in enumerate(results.collections):
        check_collection(collection, f"{where}.collections[{place}]")
        if collection.key in keys:
            raise InputError(f"{where}: holds {collection.key!r} twice; {_DAMAGED}")
        keys.add(collection.key)


def check_collection(collection: CollectionResult, where: str) -> None:
    """Check that the numbers are possible: fractions within 0 and 1, nothing counted or timed below 0, intervals in order.

    Args:
        collection: As it was read.
        where: The place to name in errors.

    Raises:
        InputError: Something cannot be; names the first such field.
    """
    _check_measures(collection.measures, collection.interval, where)
    for place, baseline in enumerate(collection.baselines):
        _check_measures(baseline.measures, baseline.interval, f"{where}.baselines[{place}]")
    index = collection.index
    fractions = {"judged": collection.judged, **{f"index.recall.{name}": share for name, share in (index.recall or {}).items()}}
    for name, fraction in fractions.items():
        _check_fraction(fraction, f"{where}.{name}")
    counts: dict[str, float] = {
        **{name: getattr(collection, name) for name in _COUNTS},
        **{f"truncated.{name}": count for name, count in asdict(collection.truncated).items()},
        **{f"seconds.{step}": seconds for step, seconds in collection.seconds.items()},
        "index.bytes": index.bytes or 0,
        "index.query_milliseconds": index.query_milliseconds or 0,
    }
    for name, count in counts.items():
        if count < 0:
            raise InputError(f"{where}.{name}: must be >= 0, got {count}; {_DAMAGED}")
    if collection.group_size < 1:
        raise InputError(f"{where}.group_size: must be >= 1, got {collection.group_size}; {_DAMAGED}")


_COUNTS = ("documents", "queries", "judgements", "k", "unanswered", "empty_texts", "cached")

_DAMAGED = "the file is damaged or was changed by hand"

# A mean of ones may be a rounding above one.
_ROUNDING = 1e-9


def _check_measures(measures: Mapping[str, float], interval: Interval, where: str) -> None:
    if HEADLINE not in measures:
        raise InputError(f"{where}.measures: has no {HEADLINE}, which every result has; {_DAMAGED}")
    for name, fraction in measures.items():
        _check_fraction(fraction, f"{where}.measures.{name}")
    if interval.low > interval.high:
        raise InputError(f"{where}.interval: low {interval.low} is above high {interval.high}; {_DAMAGED}")


def _check_fraction(fraction: float, where: str) -> None:
    if not -_ROUNDING <= fraction <= 1 + _ROUNDING:
        raise InputError(f"{where}: must be within 0 and 1, got {fraction}; {_DAMAGED}")
