"""Queries made of the vectors that an index keeps, for measuring it where there are no real ones.

A query lies between documents, and not upon one: a document's own vectors, with or without noise, meet it in the first list that is
looked at, and recall then seems better than it is. For one vector a document it is the mean of three documents chosen at random; for one
a token, some tokens of each of four.

Recall@10 at efforts from a quarter of ``fast`` to twice ``balanced``, by real queries, by these, and by documents as queries:

    one vector a document, lists              real 0.45 0.58 0.73 0.93 0.98    0.40 0.57 0.70 0.93 0.99    0.74 0.84 0.93 0.99 1.00
    one vector a document, product codes      real 0.80 0.93 0.98 1.00 1.00    0.79 0.94 0.98 1.00 1.00    0.98 0.99 1.00 1.00 1.00
    one a token, ColBERT, lists               real 0.64 0.81 0.93 0.98 0.99    0.54 0.72 0.88 0.98 1.00    0.66 0.90 0.99 0.99 1.00

The first two are 24,539 passages as means of MiniLM's token vectors, 200 queries; the last is 1,500 documents of a ColBERT trained for this
project, 100 queries, and for documents as queries 32 successive tokens of one.

Shapes: d vector width, n tokens of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.segments import OpenSegment

MIXED = {"dense": 3, "colbert": 4}
"""Documents that a query is made of, for each kind of model."""

# Tokens of a query: what short questions have.
_TOKENS = 24


@dataclass(frozen=True)
class MeasuredQuery:
    """A query, and what it was made of.

    Attributes:
        vectors: (1, d) for one vector a document; a list with one array (n, d) for one a token: what ``Index.search`` takes.
        sources: Ids of the documents that it was made of, which any search finds: they do not count. None of a real query.
    """

    vectors: Any
    sources: frozenset[str]


def pseudo_queries(segments: Sequence[OpenSegment], kind: str, *, count: int, seed: int) -> list[MeasuredQuery]:
    """Queries made of documents chosen at random.

    Args:
        segments: Of an index; deleted documents and those without a vector are left out.
        kind: ``dense`` for one vector a document, ``colbert`` for one a token.
        count: Queries, at most: no more than there are documents.
        seed: Equal segments and seed give equal queries.
    """
    rng = np.random.default_rng(seed)
    rows = [np.flatnonzero(segment.kept & (segment.vectors.lengths > 0)) for segment in segments]
    begins = np.append(0, np.cumsum([len(each) for each in rows], dtype=np.int64))
    total, made = int(begins[-1]), []
    for _ in range(min(count, total)):
        parts, ids = [], []
        for number in rng.choice(total, min(MIXED[kind], total), replace=False).tolist():
            place = int(np.searchsorted(begins, number, side="right")) - 1
            row = int(rows[place][number - begins[place]])
            parts.append(segments[place].vectors.vectors(np.array([row]))[0])
            ids.append(segments[place].documents.ids.strings[row])
        vectors = np.mean(parts, axis=0) if kind == "dense" else [np.concatenate([_some(part, rng) for part in parts])]
        made.append(MeasuredQuery(vectors, frozenset(ids)))
    return made


def _some(tokens: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Some tokens of one document, in their order."""
    size = min(_TOKENS // MIXED["colbert"], len(tokens))
    return tokens[np.sort(rng.choice(len(tokens), size, replace=False))]
