"""Why documents have the scores they have: for a ColBERT which tokens met, for one vector a text the similarity.

What is explained is the score that a search gives: the vectors are those that the index keeps, compressed or not.

Shapes: n vectors of the query, m vectors that are kept of a document, t tokens of its text, d width.
Source: ColBERT, arXiv:2004.12832, equation 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from quiver.retrieval.index import Index
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.similarity import comparable
from quiver.retrieval.protocols import DenseModel
from quiver.retrieval.records import TokenVectors
from quiver.retrieval.search.token_matches import Token, TokenMatch, match_tokens, text_tokens, token_matches


@dataclass(frozen=True)
class Explanation:
    """Why a document has its score.

    Attributes:
        document: Its id.
        score: The model's similarity of the query with the document; minus infinity where the document has no vector.
        text: The document as it was encoded, which the matches' spans are of; None where an index does not keep it.
        matches: For a ColBERT what each vector of the query met, in the order of the query: their similarities add up to the score.
            Empty for a model with one vector a text.
    """

    document: str
    score: float
    text: str | None
    matches: tuple[TokenMatch, ...]


def explain(index: Index, model: DenseModel | ColBERT, query: str, documents: Sequence[str]) -> list[Explanation]:
    """Why documents of an index have their scores for a query.

    Args:
        index: The index.
        model: The one that built it.
        query: Its text.
        documents: Ids, in any order.

    Returns:
        An explanation a document, in the order given.

    Raises:
        InputError: The index is of another model, there is no such document, or a ColBERT's index was built without texts.
    """
    index.check_model(model.card)
    if not isinstance(model, ColBERT):
        vector = comparable(model.encode([query], "query").vectors, model.card)[0]
        stored = index.manifest.policy.store_text
        return [
            Explanation(document, score, index.text_of(document) if stored else None, ())
            for document, score in zip(documents, index.scores(vector, documents).tolist(), strict=True)
        ]
    vectors, asked = model.encode([query], "query").vectors[0], text_tokens(model, query, "query")
    explained = []
    for document, score in zip(documents, index.scores(vectors, documents).tolist(), strict=True):
        text = index.text_of(document)
        explained.append(Explanation(document, score, text, tuple(_matches(index, model, document, text, vectors, asked))))
    return explained


def explain_texts(model: ColBERT, query: str, documents: Mapping[str, str]) -> list[Explanation]:
    """Why documents that no index holds have their scores for a query: both are encoded.

    Args:
        model: Encodes them.
        query: Its text.
        documents: Id -> text.
    """
    explained = []
    for document, text in documents.items():
        matches = token_matches(model, query, text)
        score = float(np.sum([match.similarity for match in matches])) if matches else -np.inf
        explained.append(Explanation(document, score, text, tuple(matches)))
    return explained


def _matches(index: Index, model: ColBERT, document: str, text: str, query: TokenVectors, asked: Sequence[Token]) -> list[TokenMatch]:
    place = index.locate([document])[0]
    if place is None:
        raise ValueError(f"document '{document}' was there a moment ago")
    stored, _ = index.segments[place.segment].vectors.vectors(np.array([place.row], np.int64))
    tokens = text_tokens(model, text, "document")
    if len(tokens) == len(stored):
        return match_tokens(query, stored, asked, tokens)
    return _pooled_matches(query, stored, model.encode([text], "document").vectors[0], asked, tokens)


def _pooled_matches(
    query: TokenVectors, stored: TokenVectors, encoded: TokenVectors, asked: Sequence[Token], tokens: Sequence[Token]
) -> list[TokenMatch]:
    """What the vectors of a query meet in a document of which fewer vectors are kept than it has tokens.

    A vector that is kept stands for the tokens that are nearer to it than to any other; of these the one is named that is nearest to the
    query's.

    Args:
        query: (n, d).
        stored: (m, d).
        encoded: The vectors of the document's tokens, (t, d).
        asked: The tokens of the query, n.
        tokens: The tokens of the document, t.
    """
    if not len(stored):
        return []
    similarities = query @ stored.T  # (n, m)
    best = similarities.argmax(axis=1)
    nearness = encoded @ stored.T  # (t, m)
    owners = nearness.argmax(axis=1)
    matches = []
    for row, column in enumerate(best.tolist()):
        own = np.flatnonzero(owners == column)
        if not len(own):  # nearly the same vector as another, which has taken all its tokens
            own = nearness[:, column].argmax(keepdims=True)
        answer = int(own[(encoded[own] @ query[row]).argmax()])
        matches.append(TokenMatch(asked[row], tokens[answer], float(similarities[row, column])))
    return matches
