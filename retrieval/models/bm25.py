"""BM25 as a model: the words of texts, and the parameters of the scores.

Lucene's variant with k1 = 0.9 and b = 0.4, English stop words and no stemmer, for any language; `quiver.retrieval.index.words` counts the
words of documents and scores them. Scores, and the words of ASCII texts, are those of bm25s, whose pattern cuts the words of many scripts
at vowel signs and accents, so that other texts are brought into one form first.

Shapes: B texts, n words of all texts.
Source: Robertson and Zaragoza 2009, doi 10.1561/1500000019; bm25s, arXiv:2407.03618; k1 and b are Anserini's for BEIR,
arXiv:2306.07471.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from quiver.encoder.progress import Advance
from quiver.retrieval.models.encoding import check_texts
from quiver.retrieval.records import ModelCard, Role, TextTokens, TokenEncoding

NAME = "bm25"  # name of BM25 in tables, files and options

K1 = 0.9
B = 0.4
STOP_WORDS = "english"
PARAMETERS: Mapping[str, str | float | None] = {"variant": "lucene", "k1": K1, "b": B, "stopwords": STOP_WORDS, "stemmer": None}
"""All parameters that affect scores, as written to results and records."""

WORD_RULES = 2  # version of the rules of `split_words`, stored with counted words: increase it when the words of any text change
MOST_WORDS = 2**31 - 1  # maximum length of a text in the card of BM25, which truncates nothing


class Words(NamedTuple):
    """The words of texts: word numbers of each text, without stop words, and word -> number, from 0 in order of appearance."""

    texts: Sequence[Sequence[int]]
    vocabulary: Mapping[str, int]


_WORD = re.compile(r"\w\w+")
# Any character that is neither Latin nor general punctuation, or a soft hyphen: texts without one need no normalization.
_BEYOND_LATIN = re.compile("[^\0-\u00ac\u00ae-\u02ff\u2010-\u205f]")
# Characters without a shape of their own: soft hyphens, joiners, marks of direction, variation selectors.
_INVISIBLE = re.compile("[\u00ad\u034f\u061c\u200c-\u200f\u2060-\u2064\ufe00-\ufe0f\ufeff\U000e0100-\U000e01ef]+")
# Letters and digits in another shape: ligatures as in PDF files, Arabic letters by their place in a word, half and full width.
_SHAPED = re.compile("[\ufb00-\ufdff\ufe70-\ufefc\uff01-\uffee]+")
_STOP_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no", "not", "of", "on", "or",
    "such", "that", "the", "their", "then", "there", "these", "they", "this", "to", "was", "will", "with",
})  # fmt: skip


def split_words(texts: Iterable[str], advance: Advance = lambda texts: None) -> Words:
    """Split texts into words: runs of two or more letters, digits and underscores, without case and without Lucene's English stop words.

    Marks, such as vowel signs and accents, belong to the letter before them. Equivalent texts have equal words: NFC and NFD; full-width
    letters, ligatures and their plain letters; words with and without invisible joiners and soft hyphens. Chinese, Japanese, Thai and other
    scripts without spaces are not cut into words: a run of letters is one.

    Args:
        texts: The texts.
        advance: Called with 1 after each text.

    Example:
        >>> split_words(["The owl, and an owl_2", "I x"])
        Words(texts=[[0, 1], []], vocabulary={'owl': 0, 'owl_2': 1})
        >>> list(split_words(["Re\u0301sume\u0301 STRASSE Straße İzmir \ufb01le"]).vocabulary)
        ['résumé', 'strasse', 'izmir', 'file']
    """
    found: list[list[int]] = []
    numbers: dict[str, int] = {}
    for text in texts:
        runs = _WORD.findall(text.lower()) if text.isascii() else _split_unicode(text)
        found.append([numbers.setdefault(word, len(numbers)) for word in runs if word not in _STOP_WORDS])
        advance(1)
    return Words(found, numbers)


def _split_unicode(text: str) -> list[str]:
    """Words of a text that is not ASCII, stop words included."""
    if not _BEYOND_LATIN.search(folded := _fold_case(text)):
        return _WORD.findall(folded)
    plain = _SHAPED.sub(lambda shaped: unicodedata.normalize("NFKC", shaped[0]), _INVISIBLE.sub("", text))
    # Normalized again, because folding takes some letters with several marks apart.
    folded = unicodedata.normalize("NFC", _fold_case(unicodedata.normalize("NFC", plain)))
    return [word for word in _pattern_with_marks().findall(folded) if len(word) > 1]


def _fold_case(text: str) -> str:
    """The text without case; a dotted capital I becomes an i, without the second dot that Unicode gives it."""
    return text.casefold().replace("i\u0307", "i")


@cache
def _pattern_with_marks() -> re.Pattern[str]:
    """Pattern of words in which marks belong to letters; made on first use, because that takes 30 ms."""
    marks = "".join(mark for mark in map(chr, range(0x300, 0x1F000)) if unicodedata.category(mark) in ("Mn", "Mc"))
    # The many ranges of this class are compared one by one: most characters after a word are excluded before.
    return re.compile(rf"\w+(?:(?![\0-\u02ff])[{marks}]+\w*)*")


class BM25:
    """BM25 as the model of an index: it encodes a text as its words, whose number and rarity the index turns into scores.

    Example:
        >>> BM25().encode_texts(["The owl and the other owl"], "document").token_ids[0].tolist()
        ['owl', 'other', 'owl']
    """

    @property
    def card(self) -> ModelCard:
        """Facts for indexes and reports."""
        rules = hashlib.sha256(json.dumps({**PARAMETERS, "words": WORD_RULES}, sort_keys=True).encode()).hexdigest()
        return ModelCard(NAME, "bm25", rules, 1, "bm25", MOST_WORDS, MOST_WORDS)

    def __repr__(self) -> str:
        return f"BM25({describe_parameters()})"

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Split texts into words: ``token_ids`` are B object arrays (n_i,), in which a word that occurs twice is there twice."""
        check_texts(texts)
        del role, progress
        words = split_words(texts)
        names = np.empty(len(words.vocabulary), object)
        for word, number in words.vocabulary.items():
            names[number] = word
        ids = [names[np.asarray(each, np.intp)] for each in words.texts]
        lengths = np.fromiter(map(len, ids), np.int32, len(ids))
        tokens = TextTokens(lengths, np.zeros(len(ids), bool), np.fromiter((not text.strip() for text in texts), bool, len(texts)))
        return TokenEncoding([np.ones((len(each), 1), np.float32) for each in ids], tokens, ids)


def query_words(text: str) -> list[str]:
    """The words of one text, in order."""
    words = split_words([text])
    names = {number: word for word, number in words.vocabulary.items()}
    return [names[number] for number in words.texts[0]]


def describe_wordless(queries: Sequence[str]) -> str | None:
    """Say that BM25 finds nothing for the queries that have no word; None if each has one.

    Example:
        >>> describe_wordless(["C++"])
        'no word of the query counts: BM25 leaves out single letters, symbols and the English stop words'
        >>> describe_wordless(["R", "red owl"])
        "no word of 1 of 2 queries, such as 'R', counts: BM25 leaves out single letters, symbols and the English stop words"
    """
    without = [query for query, words in zip(queries, split_words(queries).texts, strict=True) if not words]
    if not without:
        return None
    whose = "the query" if len(queries) == 1 else f"{len(without):,} of {len(queries):,} queries, such as {without[0][:40]!r},"
    return f"no word of {whose} counts: BM25 leaves out single letters, symbols and the English stop words"


def describe_parameters() -> str:
    """The parameters in one line: ``variant lucene, k1 0.9, b 0.4, stopwords english, no stemmer``."""
    return ", ".join(f"no {name}" if value is None else f"{name} {value}" for name, value in PARAMETERS.items())
