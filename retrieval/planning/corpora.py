"""How large a corpus is to an encoder and to a disk: from its words, or from a sample of its texts.

Shapes: P documents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import NormalDist

from quiver.encoder.errors import InputError
from quiver.retrieval.records import Document

TOKENS_A_WORD = 1.35
"""Tokens of an English word: 1.33 to 1.45 on SciFact's and Cranfield's texts with BERT's vocabulary, less on the web's."""

BYTES_A_WORD = 6.2
"""UTF-8 bytes of an English word and the space behind it."""

SPREAD = 0.5
"""Standard deviation of the logarithm of a document's tokens; matters only for what truncation leaves."""

KEPT = 0.9
"""Share of a ColBERT document's tokens that are no punctuation, whose vectors are kept."""

SPECIAL = 2
"""Special tokens of a text."""

# A line of stored texts beside id, title and text; an id where nobody knows.
_LINE, _ID_BYTES = 37, 8

TEXTS = {
    "arguana": 166.80,
    "climate-fever": 84.76,
    "cqadupstack": 129.09,
    "dbpedia-entity": 49.68,
    "fever": 84.76,
    "fiqa": 132.32,
    "hotpotqa": 46.30,
    "msmarco": 55.98,
    "nfcorpus": 232.26,
    "nq": 78.88,
    "quora": 11.44,
    "scidocs": 176.19,
    "scifact": 213.63,
    "trec-covid": 160.77,
    "webis-touche2020": 292.37,
}
"""BEIR's data sets -> words of a document on average.

Source: BEIR, arXiv:2104.08663, Table 1.
"""


@dataclass(frozen=True)
class Corpus:
    """What a plan has to know of documents.

    Attributes:
        documents: P.
        tokens: Of a document on average, special tokens in, after truncation.
        kept: Share of them that has a vector in a ColBERT index.
        line_bytes: Of a document's stored line: id, title, text, metadata.
        id_bytes: Of its id.
        source: Where the figures are from.
    """

    documents: int
    tokens: float
    kept: float
    line_bytes: float
    id_bytes: float
    source: str

    def sized(self, documents: int) -> Corpus:
        """The same texts, so many of them."""
        return replace(self, documents=documents)


def from_words(documents: int, words: float, *, length: int, source: str) -> Corpus:
    """A corpus of which the number of documents and their words are known.

    Args:
        documents: P.
        words: Of a document on average.
        length: Tokens that the model cuts a document to.
        source: Where the figures are from.
    """
    tokens = truncated_mean(words * TOKENS_A_WORD + SPECIAL, length)
    return Corpus(documents, tokens, KEPT, _LINE + _ID_BYTES + words * BYTES_A_WORD, _ID_BYTES, source)


def truncated_mean(mean: float, length: int, *, spread: float = SPREAD) -> float:
    """Tokens on average once documents are cut, if their numbers of tokens are log-normal: E[min(X, L)].

    Args:
        mean: Tokens of a whole document, on average.
        length: L.
        spread: Standard deviation s of ln X.

    Returns:
        m F((ln L - u - s^2) / s) + L (1 - F((ln L - u) / s)) with u = ln m - s^2 / 2 and F the normal distribution.

    Example:
        >>> round(truncated_mean(100, 10_000)), round(truncated_mean(300, 256)), round(truncated_mean(10_000, 256))
        (100, 220, 256)
    """
    normal, centre, limit = NormalDist(), math.log(mean) - spread**2 / 2, math.log(length)
    below = mean * normal.cdf((limit - centre - spread**2) / spread)
    return below + length * (1 - normal.cdf((limit - centre) / spread))


def from_sample(
    documents: int, sample: Sequence[Document], lengths: Callable[[Sequence[str]], tuple[float, float]], *, use_title: bool, source: str
) -> Corpus:
    """A corpus that looks like a sample of it.

    Args:
        documents: P.
        sample: Some of its documents, at least one, chosen evenly.
        lengths: Texts -> tokens of one on average after truncation, and the share of them that has a vector.
        use_title: Titles are encoded too.
        source: Where they are from.

    Raises:
        InputError: The sample is empty.
    """
    if not sample:
        raise InputError(f"{source}: no documents to plan from")
    tokens, kept = lengths([document.content(use_title=use_title) for document in sample])
    lines = [len(_line(document)) for document in sample]
    ids = [len(document.id.encode()) for document in sample]
    return Corpus(documents, tokens, kept, sum(lines) / len(lines), sum(ids) / len(ids), source)


def spread_over(documents: Iterable[Document], count: int, size: int) -> list[Document]:
    """Documents spread evenly over a corpus of which the number is known.

    Example:
        >>> [each.id for each in spread_over((Document(str(n), "") for n in range(10)), 10, 3)]
        ['0', '3', '6']
    """
    step = max(1, count // max(1, size))
    return list(islice(documents, 0, step * size, step))


def _line(document: Document) -> bytes:
    fields: dict[str, object] = {"_id": document.id, "title": document.title, "text": document.text}
    if document.metadata:
        fields["metadata"] = dict(document.metadata)
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"
