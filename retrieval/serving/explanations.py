"""Why a hit has its score, as the service says it; see `quiver.retrieval.search.explain`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.search.explain import Explanation, Token, explain, text_tokens
from quiver.retrieval.serving.generations import Generation
from quiver.retrieval.serving.schemas import HitExplanation, Meeting, TokenSpan, WordPart


def explanations(generation: Generation, query: str, documents: Sequence[str], *, words: bool) -> list[HitExplanation]:
    """Why documents have their scores, in the order given.

    Args:
        generation: Where they were found.
        query: The query's text.
        documents: Their ids.
        words: They were ranked by words.

    Raises:
        InputError: A ColBERT's index was built without texts.
    """
    if words and generation.words is not None:
        scored = [generation.words.word_scores(query, document) for document in documents]
        return [
            HitExplanation("words", math.fsum(word.score for word in parts), words=[WordPart(word.word, word.score) for word in parts])
            for parts in scored
        ]
    model = generation.model
    with model.lock:
        found = explain(generation.index, model.model, query, documents)
        return [_explanation(each, model.model) for each in found]


def _explanation(why: Explanation, model: object) -> HitExplanation:
    score = why.score if math.isfinite(why.score) else None  # JSON knows no infinity, which is the score of a text without a vector
    if not isinstance(model, ColBERT):
        return HitExplanation("similarity", score, why.text)
    passage = text_tokens(model, why.text or "", "document")
    places: dict[Token, int] = {}
    for place, token in enumerate(passage):
        places.setdefault(token, place)
    return HitExplanation(
        "tokens",
        score,
        why.text,
        query=[TokenSpan(*match.query) for match in why.matches],
        passage=[TokenSpan(*token) for token in passage],
        matches=[Meeting(row, places[match.document], match.similarity) for row, match in enumerate(why.matches)],
    )
