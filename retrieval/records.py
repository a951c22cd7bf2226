"""The records that flow through retrieval: documents, queries, judgements, vectors, hits, runs. Title and text are joined only here.

Shapes: Q queries, k hits per query, B texts, d vector width, n_i token vectors of text i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.config import Precision

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


class Document(NamedTuple):
    """A document. Its metadata can be filtered by and are not encoded."""

    id: str
    text: str
    title: str = ""
    metadata: Metadata | None = None

    def content(self, *, use_title: bool = True) -> str:
        """Return the text to encode: title and text joined by one space, as in BEIR.

        Args:
            use_title: Include the title; CoIR does not.

        Example:
            >>> Document("d1", "has wings", "A bird").content()
            'A bird has wings'
        """
        return f"{self.title} {self.text}".strip() if use_title else self.text.strip()


class Query(NamedTuple):
    """A query."""

    id: str
    text: str


class Missing(NamedTuple):
    """Part of an index that a search over several machines did not reach.

    Attributes:
        segments: Names of the segments.
        documents: Number of documents in them.
    """

    segments: tuple[str, ...]
    documents: int


@dataclass(frozen=True)
class Hits:
    """Documents found for each query, best first.

    Attributes:
        ids: Document ids, Q lists of at most k.
        scores: Scores of these documents, Q float32 arrays.
        missing: Part of the index that was not searched; None if all of it was.
    """

    ids: Sequence[Sequence[str]]
    scores: Sequence[NDArray[np.float32]]
    missing: Missing | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def partial(self) -> bool:
        """Whether part of the index was not searched."""
        return self.missing is not None

    def to_run(self, query_ids: Sequence[str]) -> dict[str, dict[str, float]]:
        """Convert the hits to a run.

        Args:
            query_ids: Q ids in the order of the queries.

        Raises:
            ValueError: The number of ids differs from the number of queries searched.
        """
        if len(query_ids) != len(self.ids):
            raise ValueError(f"got {len(query_ids)} query ids for the hits of {len(self.ids)} queries")
        return {
            query: dict(zip(ids, map(float, scores), strict=True))
            for query, ids, scores in zip(query_ids, self.ids, self.scores, strict=True)
        }


@dataclass(frozen=True)
class ModelCard:
    """Facts about a model for indexes and reports.

    Attributes:
        source: Folder or Hub id that the model was loaded from.
        kind: ``dense`` (one vector per text) or ``colbert`` (one per token).
        fingerprint: sha256 over weights, tokenizer and settings: equal fingerprints mean equal vectors.
        dim: Vector width d.
        similarity: ``cosine``, ``dot`` or ``maxsim``.
        query_length: Maximum tokens of a query, special tokens included.
        document_length: Maximum tokens of a document, special tokens included.
        query_prompt: Text or token put before every query.
        document_prompt: Text or token put before every document.
        precision: Precision of the weight matrices; int8 and float have different fingerprints.
        library: Library that runs the model.
    """

    source: str
    kind: Literal["dense", "colbert"]
    fingerprint: str
    dim: int
    similarity: Literal["cosine", "dot", "maxsim"]
    query_length: int
    document_length: int
    query_prompt: str = ""
    document_prompt: str = ""
    precision: Precision = "float"
    library: Literal["quiver", "sentence-transformers", "pylate"] = "quiver"


@dataclass(frozen=True)
class TokenCounts:
    """Token counts of a set of texts.

    Attributes:
        texts: Number of texts.
        tokens: Number of tokens after truncation, special tokens included.
        truncated: Number of truncated texts.
        empty: Number of blank texts.
    """

    texts: int
    tokens: int
    truncated: int
    empty: int


@dataclass(frozen=True)
class TextTokens:
    """Token counts of each of B texts.

    Attributes:
        tokens: Number of tokens after truncation, special tokens included, (B,) int32.
        truncated: Whether the text was truncated, (B,) bool.
        empty: Whether the text is blank, (B,) bool.
    """

    tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    empty: NDArray[np.bool_]

    def total(self) -> TokenCounts:
        """Sum the counts.

        Example:
            >>> TextTokens(np.array([3, 8], np.int32), np.array([False, True]), np.array([False, False])).total()
            TokenCounts(texts=2, tokens=11, truncated=1, empty=0)
        """
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
    """Token vectors and token counts.

    Attributes:
        vectors: B arrays of (n_i, d).
        tokens: Token counts.
        token_ids: Id of each vector's token, B arrays of (n_i,) uint32; None if the model does not return them.
    """

    vectors: list[TokenVectors]
    tokens: TextTokens
    token_ids: list[NDArray[np.uint32]] | None = None

    @property
    def counts(self) -> TokenCounts:
        """Token counts of all texts."""
        return self.tokens.total()
