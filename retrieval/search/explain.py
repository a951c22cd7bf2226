"""Explain scores: for ColBERT the token matches of MaxSim, for single-vector models the similarity.

The similarities of the token matches are the terms of MaxSim's sum: they add up to the document's score. Vectors are those that the index
stores, compressed or not.

Shapes: n query vectors, m stored document vectors, t document tokens, d vector width.
Source: ColBERT, arXiv:2004.12832, equation 3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders

from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.records import DenseModel, Role, TokenVectors

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from quiver.encoder import Tokenizer
    from quiver.retrieval.models.colbert import ColBERT

_SENTENCEPIECE_SPACE = "\u2581"
_NO_CHARACTER = "\ufffd"


class Token(NamedTuple):
    """The token of a vector.

    Attributes:
        name: The token as text. A byte-level token is decoded, without the space before the word; a WordPiece keeps its ``##``; special
            tokens, prefixes and expansion tokens have their names, such as ``[CLS]``, ``[Q]`` and ``[MASK]``.
        span: Offsets of the first character in the text and behind the last. None for tokens that are not in the text: special tokens,
            prefixes, expansion, and the words of a prompt. Tokens that are bytes of one character share its span.
    """

    name: str
    span: tuple[int, int] | None


class QueryTokenMatch(NamedTuple):
    """A query token and its best match in the document.

    Attributes:
        query: The query token.
        document: The document's token with the highest similarity; the first one if several are equal.
        similarity: Their similarity, -1 to 1: the contribution to the score.
    """

    query: Token
    document: Token
    similarity: float


def token_matches(model: ColBERT, query: str, document: str) -> list[QueryTokenMatch]:
    """Find the best match of every query vector in a document, in the order of the query.

    Args:
        model: The model that encodes both.
        query: Text of the query.
        document: Text of the document, including the title. Tokens of the skiplist have no vector and are never matched.

    Returns:
        n matches, expansion tokens included; empty if the document has no vectors.
    """
    vectors = model.encode_texts([query], "query").vectors[0], model.encode_texts([document], "document").vectors[0]
    return match_tokens(*vectors, text_tokens(model, query, "query"), text_tokens(model, document, "document"))


def match_tokens(
    query: TokenVectors, document: TokenVectors, query_tokens: Sequence[Token], document_tokens: Sequence[Token]
) -> list[QueryTokenMatch]:
    """Find the best match of every query vector among the vectors of a document.

    Args:
        query: Query vectors, (n, d).
        document: Document vectors, (m, d); m may be 0.
        query_tokens: Tokens of the query vectors, n.
        document_tokens: Tokens of the document vectors, m.

    Returns:
        n matches in the order of the query; empty if m is 0.
    """
    if not len(document):
        return []
    similarities = query @ document.T  # (n, m)
    best = similarities.argmax(axis=1).tolist()
    return [
        QueryTokenMatch(token, document_tokens[column], float(similarities[row, column]))
        for row, (token, column) in enumerate(zip(query_tokens, best, strict=True))
    ]


def text_tokens(model: ColBERT, text: str, role: Role) -> list[Token]:
    """Return the tokens of a text's vectors, in the order of the vectors.

    Args:
        model: The model, for its tokenizer and settings.
        text: A query or a document.
        role: Role of the text; decides prefix, length, expansion and skiplist.
    """
    from quiver.retrieval.models.encoding import clean

    settings, tokenizer = model.settings.colbert, model.tokenizer
    prefix = settings.query_prefix if role == "query" else settings.document_prefix
    length = settings.query_length if role == "query" else settings.document_length
    prompt = model.settings.query_prompt if role == "query" else model.settings.document_prompt
    encoded = _backend(tokenizer, len(tokenizer), length - bool(prefix)).encode(
        clean([text], prompt=prompt, lower_case=model.settings.lower_case)[0]
    )
    positions = _text_positions(text, prompt, lower_case=model.settings.lower_case)
    spans = [
        None if special else _span(text, positions, span)
        for span, special in zip(encoded.offsets, encoded.special_tokens_mask, strict=True)
    ]
    found: list[tuple[int, tuple[int, int] | None]] = list(zip(encoded.ids, spans, strict=True))
    if (inserted := tokenizer.token_id(prefix) if prefix else None) is not None:
        found = [*found[:1], (inserted, None), *found[1:]]
    if role == "query":
        expansion = tokenizer.special_id("mask") if settings.query_expansion else None
        found += [] if expansion is None else [(expansion, None)] * ((settings.expanded_length or length) - len(found))
    else:
        # As in the model: a word that is not a single token means [UNK].
        known = [tokenizer.token_id(word) for word in settings.skiplist]
        skipped = {tokenizer.special_id("unk") if token is None else token for token in known}
        found = [(token, span) for token, span in found if token not in skipped]
    name = _names(tokenizer, len(tokenizer))
    return [Token(name(token), span) for token, span in found]


def _text_positions(text: str, prompt: str, *, lower_case: bool) -> list[int]:
    """Position in the text of each character that is tokenized; negative in the prompt (see `quiver.retrieval.models.encoding.clean`)."""
    whole = prompt + text
    first = len(whole) - len(whole.lstrip()) - len(prompt)
    # A lower-case letter may be two characters.
    return [first + position for position, character in enumerate(whole.strip()) for _ in (character.lower() if lower_case else character)]


def _span(text: str, positions: Sequence[int], offsets: tuple[int, int]) -> tuple[int, int] | None:
    """Span of a token in its text without outer white space, from its offsets in the tokenized text."""
    begin, end = offsets
    if begin == end:
        return None
    first, last = max(positions[begin], 0), positions[end - 1] + 1
    if first >= last:
        return None
    word = text[first:last]
    if not word.strip():  # the token is white space only
        return first, last
    first += len(word) - len(word.lstrip())
    return first, first + len(word.strip())


@lru_cache(maxsize=8)
def _backend(tokenizer: Tokenizer, size: int, length: int) -> Any:
    """Tokenizer that returns offsets. Parsing the rules takes 0.1 s; ``size`` invalidates the cache when a token is added."""
    del size
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.enable_truncation(length, direction=tokenizer.truncation_side)
    return backend


@lru_cache(maxsize=4)
def _names(tokenizer: Tokenizer, size: int) -> Callable[[int], str]:
    """Function from token id to readable text. Parsing the rules takes 0.1 s; ``size`` invalidates the cache when a token is added."""
    del size
    text = tokenizer.to_json()
    rules, backend = json.loads(text), tokenizers.Tokenizer.from_str(text)
    added = {token["id"]: token["content"].strip() for token in rules["added_tokens"]}
    byte_level = decoders.ByteLevel() if '"ByteLevel"' in json.dumps([rules["pre_tokenizer"], rules["decoder"]]) else None

    @cache
    def readable(token: int) -> str:
        if token in added:
            return str(added[token])
        raw: str = backend.id_to_token(token)
        if byte_level is None:
            return raw.removeprefix(_SENTENCEPIECE_SPACE) or raw
        word: str = byte_level.decode([raw])
        if _NO_CHARACTER in word:  # the token is a part of a character's bytes
            return raw
        return word.strip() or repr(word)

    return readable


@dataclass(frozen=True)
class Explanation:
    """Explanation of a document's score.

    Attributes:
        document: Id of the document.
        score: The model's similarity of query and document; minus infinity if the document has no vectors.
        text: The document as it was encoded; spans of the matches refer to it. None if the index stores no texts.
        matches: For a ColBERT model one match per query vector, in the order of the query; their similarities add up to the score.
            Empty for a model with one vector per text.
    """

    document: str
    score: float
    text: str | None
    matches: tuple[QueryTokenMatch, ...]


def explain(index: IndexReader, model: DenseModel | ColBERT, query: str, documents: Sequence[str]) -> list[Explanation]:
    """Explain the scores of documents of an index for a query.

    Args:
        index: The index.
        model: The model that built it.
        query: Text of the query.
        documents: Document ids.

    Returns:
        One explanation per document, in the order given.

    Raises:
        InputError: Another model built the index, a document does not exist, or the index of a ColBERT model stores no texts.
    """
    index.check_model(model.card)
    if not _is_colbert(model):
        from quiver.retrieval.models.encoding import comparable

        vector = comparable(model.encode_texts([query], "query").vectors, model.card)[0]
        stored = index.manifest.policy.store_text
        return [
            Explanation(document, score, index.text_of(document) if stored else None, ())
            for document, score in zip(documents, index.scores(vector, documents).tolist(), strict=True)
        ]
    vectors, query_tokens = model.encode_texts([query], "query").vectors[0], text_tokens(model, query, "query")
    explained = []
    for document, score in zip(documents, index.scores(vectors, documents).tolist(), strict=True):
        text = index.text_of(document)
        explained.append(Explanation(document, score, text, tuple(_matches(index, model, document, text, vectors, query_tokens))))
    return explained


def _is_colbert(model: DenseModel | ColBERT) -> TypeIs[ColBERT]:
    return model.card.kind == "colbert"


def explain_texts(model: ColBERT, query: str, documents: Mapping[str, str]) -> list[Explanation]:
    """Explain the scores of texts for a query, without an index.

    Args:
        model: The model that encodes query and documents.
        query: Text of the query.
        documents: Document id -> text.
    """
    explained = []
    for document, text in documents.items():
        matches = token_matches(model, query, text)
        score = float(np.sum([match.similarity for match in matches])) if matches else -np.inf
        explained.append(Explanation(document, score, text, tuple(matches)))
    return explained


def _matches(
    index: IndexReader, model: ColBERT, document: str, text: str, query: TokenVectors, query_tokens: Sequence[Token]
) -> list[QueryTokenMatch]:
    location = index.locate([document])[0]
    if location is None:
        raise ValueError(f"document '{document}' was deleted during the search")
    stored, _ = index.segments[location.segment].vectors.vectors(np.array([location.row], np.int64))
    tokens = text_tokens(model, text, "document")
    if len(tokens) == len(stored):
        return match_tokens(query, stored, query_tokens, tokens)
    return _pooled_matches(query, stored, model.encode_texts([text], "document").vectors[0], query_tokens, tokens)


def _pooled_matches(
    query: TokenVectors, stored: TokenVectors, encoded: TokenVectors, query_tokens: Sequence[Token], tokens: Sequence[Token]
) -> list[QueryTokenMatch]:
    """Match query vectors with a document that has fewer stored vectors than tokens.

    A stored vector represents the tokens that are nearest to it; of these the one nearest to the query vector is reported.

    Args:
        query: Query vectors, (n, d).
        stored: Stored vectors of the document, (m, d).
        encoded: Vectors of the document's tokens, (t, d).
        query_tokens: Tokens of the query, n.
        tokens: Tokens of the document, t.
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
        if not len(own):  # another, nearly equal vector represents all its tokens
            own = nearness[:, column].argmax(keepdims=True)
        best_token = int(own[(encoded[own] @ query[row]).argmax()])
        matches.append(QueryTokenMatch(query_tokens[row], tokens[best_token], float(similarities[row, column])))
    return matches
