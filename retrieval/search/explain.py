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
from quiver.retrieval.models.encoding import clean, comparable
from quiver.retrieval.records import DenseModel, Role, TokenModel, TokenVectors

if TYPE_CHECKING:
    from quiver.encoder import Tokenizer

_SENTENCEPIECE_SPACE = "\u2581"
_NO_CHARACTER = "\ufffd"


class Token(NamedTuple):
    """The token of a vector, as text, and its span: offsets of the first character in the text and behind the last.

    A byte-level token is decoded, without the space before the word; a WordPiece keeps its ``##``. Special tokens, prefixes and expansion
    tokens have their names, such as ``[CLS]``, ``[Q]`` and ``[MASK]``; they and the words of a prompt have no span. Tokens that are bytes
    of one character share its span.
    """

    name: str
    span: tuple[int, int] | None


class QueryTokenMatch(NamedTuple):
    """A query token, the most similar token of the document (the first of equal ones), and the similarity, which is part of the score."""

    query: Token
    document: Token
    similarity: float


def token_matches(model: Any, query: str, document: str) -> list[QueryTokenMatch]:
    """The best match of every query vector in the text of a document, in the order of the query; empty if it has no vectors."""
    vectors = model.encode_texts([query], "query").vectors[0], model.encode_texts([document], "document").vectors[0]
    return _match_tokens(*vectors, text_tokens(model, query, "query"), text_tokens(model, document, "document"))


def _match_tokens(
    query: TokenVectors, document: TokenVectors, query_tokens: Sequence[Token], document_tokens: Sequence[Token]
) -> list[QueryTokenMatch]:
    """The best match of every query vector, (n, d), among the vectors of a document, (m, d)."""
    if not len(document):
        return []
    similarities = query @ document.T  # (n, m)
    best = similarities.argmax(axis=1).tolist()
    return [
        QueryTokenMatch(token, document_tokens[column], float(similarities[row, column]))
        for row, (token, column) in enumerate(zip(query_tokens, best, strict=True))
    ]


def text_tokens(model: Any, text: str, role: Role) -> list[Token]:
    """The tokens of a text's vectors, in their order; the role decides prefix, length, expansion and skiplist."""
    while not hasattr(model, "settings"):  # shared by threads, or with its queries encoded
        model = model.model
    settings, tokenizer = model.settings.colbert, model.tokenizer
    prefix = settings.query_prefix if role == "query" else settings.document_prefix
    length = settings.query_length if role == "query" else settings.document_length
    prompt = model.settings.query_prompt if role == "query" else model.settings.document_prompt
    encoded = _offset_tokenizer(tokenizer, len(tokenizer), length - bool(prefix)).encode(
        clean([text], prompt=prompt, lower_case=model.settings.lower_case)[0]
    )
    # Position in the text of each character that is tokenized, negative in the prompt; a lower-case letter may be two characters.
    whole, lower = prompt + text, model.settings.lower_case
    begin = len(whole) - len(whole.lstrip()) - len(prompt)
    positions = [begin + number for number, letter in enumerate(whole.strip()) for _ in (letter.lower() if lower else letter)]
    spans = [
        None if special else _find_span(text, positions, span)
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
    name = _token_names(tokenizer, len(tokenizer))
    return [Token(name(token), span) for token, span in found]


def _find_span(text: str, positions: Sequence[int], offsets: tuple[int, int]) -> tuple[int, int] | None:
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
def _offset_tokenizer(tokenizer: Tokenizer, size: int, length: int) -> Any:
    """Tokenizer that returns offsets. Parsing the rules takes 0.1 s; ``size`` invalidates the cache when a token is added."""
    del size
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.enable_truncation(length, direction=tokenizer.truncation_side)
    return backend


@lru_cache(maxsize=4)
def _token_names(tokenizer: Tokenizer, size: int) -> Callable[[int], str]:
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
        text: The document as it was encoded, to which spans refer; None if the index stores no texts.
        matches: One per query vector of a ColBERT model, in their order, whose similarities sum to the score; else empty.
    """

    document: str
    score: float
    text: str | None
    matches: tuple[QueryTokenMatch, ...]


def explain(index: IndexReader, model: DenseModel | TokenModel, query: str, documents: Sequence[str]) -> list[Explanation]:
    """Explain the scores of documents of an index for a query, one after the other.

    Raises:
        InputError: Another model built the index, a document does not exist, or the index of a ColBERT model stores no texts.
    """
    index.check_model(model.card)
    encoding: Any = model.encode_texts([query], "query")
    if model.card.kind != "colbert":
        vector, stored = comparable(encoding.vectors, model.card)[0], index.manifest.policy.store_text
        return [
            Explanation(document, score, index.text_of(document) if stored else None, ())
            for document, score in zip(documents, index.scores(vector, documents).tolist(), strict=True)
        ]
    vectors, query_tokens = encoding.vectors[0], text_tokens(model, query, "query")
    explained = []
    for document, score in zip(documents, index.scores(vectors, documents).tolist(), strict=True):
        text = index.text_of(document)
        place = index.locate([document])[0]
        if place is None:
            raise ValueError(f"document '{document}' was deleted during the search")
        own, _ = index.segments[place.segment].vectors.vectors(np.array([place.row], np.int64))
        tokens = text_tokens(model, text, "document")
        if len(tokens) == len(own):
            matches = _match_tokens(vectors, own, query_tokens, tokens)
        else:
            encoded: Any = model.encode_texts([text], "document")
            matches = _pooled_matches(vectors, own, encoded.vectors[0], query_tokens, tokens)
        explained.append(Explanation(document, score, text, tuple(matches)))
    return explained


def explain_texts(model: TokenModel, query: str, documents: Mapping[str, str]) -> list[Explanation]:
    """Explain the scores of texts, document id -> text, for a query, without an index."""
    explained = []
    for document, text in documents.items():
        matches = token_matches(model, query, text)
        score = float(np.sum([match.similarity for match in matches])) if matches else -np.inf
        explained.append(Explanation(document, score, text, tuple(matches)))
    return explained


def _pooled_matches(
    query: TokenVectors, stored: TokenVectors, encoded: TokenVectors, query_tokens: Sequence[Token], tokens: Sequence[Token]
) -> list[QueryTokenMatch]:
    """Match with fewer stored vectors, (m, d), than tokens, (t, d): of the tokens nearest to a vector, that nearest to the query counts."""
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
