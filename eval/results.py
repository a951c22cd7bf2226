"""The results of an evaluation: what was scored, how, and what came out; the fields of ``results.json``.

All measures are fractions at full precision; points and rounding are a report's business. This module knows nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from encoder.config import Precision
from eval.provenance import Provenance
from retrieval.records import ModelCard

HEADLINE = "ndcg@10"
"""The measure that stands for a result."""

Parameter: TypeAlias = str | int | float | bool | None
"""A setting of an index or a baseline."""


@dataclass(frozen=True)
class System:
    """What was evaluated: the fields of a model card, None or empty where a system has no such thing.

    Attributes:
        source: Folder or hub id that the model was loaded from, or ``bm25``.
        kind: ``dense``, ``colbert`` or ``bm25``.
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
        kind: What it is: ``exact`` or ``bm25``.
        parameters: Its settings.
    """

    kind: str
    parameters: Mapping[str, Parameter]


@dataclass(frozen=True)
class WorstQuery:
    """One of the queries with the lowest nDCG@10.

    Attributes:
        query: Its id.
        text: Its text.
        score: Its nDCG@10.
        first: Id of the document that was found first; None where nothing was found.
        wanted: Ids of the relevant documents, the best grade first.
    """

    query: str
    text: str
    score: float
    first: str | None
    wanted: tuple[str, ...]


@dataclass(frozen=True)
class Baseline:
    """What a baseline scored on the same collection, under the same policy and cut.

    Attributes:
        name: ``bm25``.
        parameters: Its settings.
        measures: Measure -> mean over the judged queries.
        run: Its TREC run; None when no folder was written.
    """

    name: str
    parameters: Mapping[str, Parameter]
    measures: Mapping[str, float]
    run: FileReference | None


@dataclass(frozen=True)
class CollectionResult:
    """What a system scored on one split of a collection, and how.

    Attributes:
        name: The collection.
        split: Its split.
        documents: Documents searched, which is all of them.
        queries: Judged queries: the number that every mean is over.
        judgements: Judgements of the split, of any grade.
        use_title: Titles were part of the documents' text.
        exclude_self: A document with the query's own id was dropped before the cut.
        k: Documents kept for a query, at most.
        measures: Measure -> mean over the judged queries.
        unanswered: Judged queries for which nothing was found; each scores 0.
        truncated: Texts that were longer than the model reads.
        empty_texts: Documents without a text.
        index: What was searched.
        seconds: Wall clock of ``encode_documents`` (encoding and indexing the documents) and ``search`` (encoding the queries
            and searching) for a model, of ``search`` alone (indexing included) for BM25.
        run: The TREC run; None when no folder was written.
        per_query: The scores of every query, ``{query: {measure: value}}``; None when no folder was written.
        data_sha256: Checksum over documents, queries and judgements: equal checksums are the same data.
        worst: The queries with the lowest nDCG@10, at most ten, the worst first and equals by id.
        baselines: What the baselines scored.
    """

    name: str
    split: str
    documents: int
    queries: int
    judgements: int
    use_title: bool
    exclude_self: bool
    k: int
    measures: Mapping[str, float]
    unanswered: int
    truncated: Truncated
    empty_texts: int
    index: IndexUsed
    seconds: Mapping[str, float]
    run: FileReference | None
    per_query: FileReference | None
    data_sha256: str
    worst: tuple[WorstQuery, ...]
    baselines: tuple[Baseline, ...]

    @property
    def key(self) -> str:
        """The collection with its split, as files and tables name it: ``scifact.test``."""
        return f"{self.name}.{self.split}"


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
        """The mean nDCG@10 over the collections; None if there are none, or one was not scored by it."""
        scores = [collection.measures.get(HEADLINE) for collection in self.collections]
        known = [score for score in scores if score is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(scores) else None
