"""The BM25 baseline: the floor under every table.

Lucene's variant with k1 = 0.9 and b = 0.4, English stop words and no stemmer, whatever the language or the kind of text:
one rule for all collections, so that the floors can be compared. Title and text are scored as one field.

Source: Robertson and Zaragoza 2009, doi 10.1561/1500000019; bm25s, arXiv:2407.03618; k1 and b are Anserini's for BEIR,
arXiv:2306.07471.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from eval.benchmark import Policy, cut, depth
from retrieval.corpus import Collection

PARAMETERS: Mapping[str, str | float | None] = {
    "variant": "lucene",
    "k1": 0.9,
    "b": 0.4,
    "stopwords": "english",
    "stemmer": None,
}
"""Everything that decides a score, as ``results.json`` records it."""


def bm25_run(collection: Collection, *, k: int = 1000, use_title: bool = True, exclude_self: bool = False) -> dict[str, dict[str, float]]:
    """Rank the collection's documents for its queries.

    Args:
        collection: Documents and queries.
        k: Documents a query, at most; a k beyond the collection is no error.
        use_title: Titles are part of the text.
        exclude_self: A document with the query's own id is dropped before the cut.

    Returns:
        A run with every query in it. Only documents that share a term with the query are in it: the top k of bm25s is
        padded with documents of score 0, whose order would be that of the file.

    Raises:
        InputError: bm25s is not installed.
        ValueError: k < 1.
    """
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    bm25s = _bm25s()
    ids = [document.id for document in collection.documents]
    corpus = bm25s.tokenize(
        [document.content(use_title=use_title) for document in collection.documents],
        stopwords=PARAMETERS["stopwords"],
        stemmer=PARAMETERS["stemmer"],
        show_progress=False,
    )
    if not corpus.vocab:  # not one word in the whole collection: bm25s cannot index that, and nothing can be found in it
        return {query.id: {} for query in collection.queries}
    index = bm25s.BM25(k1=PARAMETERS["k1"], b=PARAMETERS["b"], method=PARAMETERS["variant"])
    index.index(corpus, show_progress=False)
    terms = bm25s.tokenize(
        [query.text for query in collection.queries],
        stopwords=PARAMETERS["stopwords"],
        stemmer=PARAMETERS["stemmer"],
        return_ids=False,
        show_progress=False,
    )
    policy = Policy(exclude_self=exclude_self, use_title=use_title)
    best = {
        query.id: _best(ids, index.get_scores_from_ids(index.get_tokens_ids(words)), depth(k, policy))
        for query, words in zip(collection.queries, terms, strict=True)
    }
    return cut(best, k, policy)


def _best(ids: Sequence[str], scores: NDArray[np.float32], k: int) -> dict[str, float]:
    """Every document with a positive score, or where there are more than k, those not below the k-th: ties stay whole.

    The cut among equals is by document id and is made later; ``BM25.retrieve`` would make it by chance.
    """
    found = np.flatnonzero(scores > 0)
    if len(found) > k:
        threshold = np.partition(scores[found], len(found) - k)[len(found) - k]
        found = found[scores[found] >= threshold]
    return {ids[place]: float(scores[place]) for place in found.tolist()}


def _bm25s() -> ModuleType:
    try:
        library = importlib.import_module("bm25s")
    except ModuleNotFoundError as error:
        raise InputError("BM25 needs bm25s: pip install 'quiver-retrieval[eval]'") from error
    # Importing it sets its logger to DEBUG, and whoever has a handler at the root would read how an index is built.
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    return library
