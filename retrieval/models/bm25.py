"""BM25 as a model: the words of texts, and the parameters of the scores.

Lucene's variant with k1 = 0.9 and b = 0.4, English stop words and no stemmer, for any language. Words and scores are those of bm25s, whose
import alone takes longer than a search. Its index stores scores, which include the document frequencies of the whole corpus, so that adding
one document would change all of them. `quiver.retrieval.index.words` counts the words of documents and scores them.

Shapes: B texts, n words of all texts.
Source: Robertson and Zaragoza 2009, doi 10.1561/1500000019; bm25s, arXiv:2407.03618; k1 and b are Anserini's for BEIR,
arXiv:2306.07471.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from quiver.encoder.progress import Advance
from quiver.retrieval.models.encoding import check_texts
from quiver.retrieval.records import ModelCard, Role, TextTokens, TokenEncoding

NAME = "bm25"
"""Name of BM25 in tables, files and options."""

K1 = 0.9
B = 0.4
STOP_WORDS = "english"
PARAMETERS: Mapping[str, str | float | None] = {
    "variant": "lucene",
    "k1": K1,
    "b": B,
    "stopwords": STOP_WORDS,
    "stemmer": None,
}
"""All parameters that affect scores, as written to results and records."""

MOST_WORDS = 2**31 - 1
"""Maximum length of a text in the card of BM25, which truncates nothing."""


class Words(NamedTuple):
    """The words of texts.

    Attributes:
        texts: Word numbers of each text, without stop words.
        vocabulary: Word -> number, from 0 in order of appearance.
    """

    texts: Sequence[Sequence[int]]
    vocabulary: Mapping[str, int]


_WORD = re.compile(r"\b\w\w+\b")
_STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of", "on", "or"),
        *("such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with"),
    )
)


def split_words(texts: Iterable[str], advance: Advance = lambda texts: None) -> Words:
    """Split texts into words: lower case, runs of two or more letters, digits and underscores, without Lucene's English stop words.

    Args:
        texts: The texts.
        advance: Called with 1 after each text.

    Example:
        >>> split_words(["The owl, and an owl_2", "I x"])
        Words(texts=[[0, 1], []], vocabulary={'owl': 0, 'owl_2': 1})
    """
    found: list[list[int]] = []
    numbers: dict[str, int] = {}
    for text in texts:
        words = (word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS)
        found.append([numbers.setdefault(word, len(numbers)) for word in words])
        advance(1)
    return Words(found, numbers)


class BM25:
    """BM25 as the model of an index: it encodes a text as its words, whose number and rarity the index turns into scores.

    Example:
        >>> BM25().encode_texts(["The owl and the other owl"], "document").token_ids[0].tolist()
        ['owl', 'other', 'owl']
    """

    @property
    def card(self) -> ModelCard:
        """Facts for indexes and reports."""
        rules = hashlib.sha256(json.dumps(dict(PARAMETERS), sort_keys=True).encode()).hexdigest()
        return ModelCard(NAME, "bm25", rules, 1, "bm25", MOST_WORDS, MOST_WORDS)

    def __repr__(self) -> str:
        return f"BM25({describe_parameters()})"

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Split texts into words; a word that occurs twice is there twice.

        Args:
            texts: B texts.
            role: Queries and documents have the same words.
            progress: Not used; splitting is fast.

        Returns:
            The words as ``token_ids``, B object arrays (n_i,). Each has the vector [1]: one occurrence.

        Raises:
            InputError: A text contains half of a surrogate pair; names its number, from 0.
            ValueError: An item is not a string.
        """
        check_texts(texts)
        del role, progress
        if not texts:
            none = np.zeros(0, np.int32)
            return TokenEncoding([], TextTokens(none, none.astype(bool), none.astype(bool)), [])
        words = split_words(texts)
        names = np.empty(len(words.vocabulary), object)
        for word, number in words.vocabulary.items():
            names[number] = word
        ids = [names[np.asarray(each, np.intp)] for each in words.texts]
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        tokens = TextTokens(lengths, np.zeros(len(ids), bool), np.array([not text.strip() for text in texts], bool))
        return TokenEncoding([np.ones((len(each), 1), np.float32) for each in ids], tokens, ids)


def query_words(text: str) -> list[str]:
    """The words of one text, in order."""
    words = split_words([text])
    names = {number: word for word, number in words.vocabulary.items()}
    return [names[number] for number in words.texts[0]]


def describe_parameters() -> str:
    """The parameters in one line.

    Example:
        >>> describe_parameters()
        'variant lucene, k1 0.9, b 0.4, stopwords english, no stemmer'
    """
    return ", ".join(f"no {name}" if value is None else f"{name} {value}" for name, value in PARAMETERS.items())
