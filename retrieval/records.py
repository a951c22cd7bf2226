"""The records that flow through retrieval: documents, queries, judgements, vectors, hits, runs.

This module knows nothing of models, files or indexes. Title and text are joined here and only here.

Shapes: Q queries, k hits a query, B texts, d vector width, n_i token vectors of text i.
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
"""A ranking: query id -> document id -> score; the order is by score, then document id descending, as trec_eval has it."""

DenseVectors: TypeAlias = NDArray[np.float32]
"""One vector a text, (B, d)."""

TokenVectors: TypeAlias = NDArray[np.float32]
"""The vectors of one text's tokens, (n_i, d)."""

Value: TypeAlias = str | int | float | bool
"""A value of a document's metadata."""

Metadata: TypeAlias = Mapping[str, Value | Sequence[Value]]
"""What is known of a document beside its text: field -> value, or values."""

Role: TypeAlias = Literal["query", "document"]
"""Which side of the search a text is on: prompts, lengths and expansion depend on it."""


class Document(NamedTuple):
    """A document as its collection gives it; what it has beside its text may be filtered by, and is not encoded."""

    id: str
    text: str
    title: str = ""
    metadata: Metadata | None = None

    def content(self, *, use_title: bool = True) -> str:
        """The text that is encoded: title and text joined by one space, as BEIR does it.

        Args:
            use_title: False leaves the title away (CoIR's convention).

        Example:
            >>> Document("d1", "has wings", "A bird").content()
            'A bird has wings'
        """
        return f"{self.title} {self.text}".strip() if use_title else self.text.strip()


class Query(NamedTuple):
    """A query as its collection gives it."""

    id: str
    text: str


class Missing(NamedTuple):
    """The part of an index that a search over several machines could not ask.

    Attributes:
        segments: Names of its segments.
        documents: How many documents are in them.
    """

    segments: tuple[str, ...]
    documents: int


@dataclass(frozen=True)
class Hits:
    """What an index found: for each query its documents, best first.

    Attributes:
        ids: Document ids, Q lists of at most k.
        scores: Scores in the same places, Q float32 arrays.
        missing: What was not asked, and may hold better documents; None where everything was.
    """

    ids: Sequence[Sequence[str]]
    scores: Sequence[NDArray[np.float32]]
    missing: Missing | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def partial(self) -> bool:
        """Whether some of the index was not asked."""
        return self.missing is not None

    def to_run(self, query_ids: Sequence[str]) -> dict[str, dict[str, float]]:
        """The hits as a run.

        Args:
            query_ids: Q ids in the order the queries were searched in.

        Raises:
            ValueError: The number of ids differs from the number of queries searched.
        """
        if len(query_ids) != len(self.ids):
            raise ValueError(f"{len(query_ids)} query ids for the hits of {len(self.ids)} queries")
        return {
            query: dict(zip(ids, map(float, scores), strict=True))
            for query, ids, scores in zip(query_ids, self.ids, self.scores, strict=True)
        }


@dataclass(frozen=True)
class ModelCard:
    """What an index or a report has to know of the model whose vectors it holds.

    Attributes:
        source: Folder or hub id that the model was loaded from.
        kind: ``dense`` (one vector a text) or ``colbert`` (one a token).
        fingerprint: sha256 over weights, tokenizer and settings: equal fingerprints give equal vectors.
        dim: Width d of a vector.
        similarity: ``cosine``, ``dot`` or ``maxsim``.
        query_length: Tokens a query is cut to, special tokens included.
        document_length: Tokens a document is cut to, special tokens included.
        query_prompt: Text or token put before every query.
        document_prompt: Text or token put before every document.
        precision: How its matrices are multiplied; int8 has other vectors and another fingerprint than float.
        library: What runs it: this package, or a peer whose models are scored beside its own.
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
    """What tokenising a set of texts did to them.

    Attributes:
        texts: Number of texts.
        tokens: Tokens after truncation, special tokens included.
        truncated: Texts that lost tokens.
        empty: Texts without a single character.
    """

    texts: int
    tokens: int
    truncated: int
    empty: int


@dataclass(frozen=True)
class TextTokens:
    """What tokenising did to each of B texts.

    Attributes:
        tokens: Tokens after truncation, special tokens included, (B,) int32.
        truncated: Whether the text lost tokens, (B,) bool.
        empty: Whether it is without a single character, (B,) bool.
    """

    tokens: NDArray[np.int32]
    truncated: NDArray[np.bool_]
    empty: NDArray[np.bool_]

    def total(self) -> TokenCounts:
        """All texts together.

        Example:
            >>> TextTokens(np.array([3, 8], np.int32), np.array([False, True]), np.array([False, False])).total()
            TokenCounts(texts=2, tokens=11, truncated=1, empty=0)
        """
        return TokenCounts(len(self.tokens), int(self.tokens.sum()), int(self.truncated.sum()), int(self.empty.sum()))


@dataclass(frozen=True)
class DenseEncoding:
    """Vectors of one-vector texts, (B, d), and what tokenising did to each."""

    vectors: DenseVectors
    tokens: TextTokens

    @property
    def counts(self) -> TokenCounts:
        """What tokenising did to all of them."""
        return self.tokens.total()


@dataclass(frozen=True)
class TokenEncoding:
    """Token vectors, B arrays of (n_i, d), and what tokenising did to each text.

    Attributes:
        vectors: B arrays of (n_i, d).
        tokens: What tokenising did.
        token_ids: The vocabulary's number of each vector's token, B arrays of (n_i,) uint32; None where the model does not say.
    """

    vectors: list[TokenVectors]
    tokens: TextTokens
    token_ids: list[NDArray[np.uint32]] | None = None

    @property
    def counts(self) -> TokenCounts:
        """What tokenising did to all of them."""
        return self.tokens.total()
