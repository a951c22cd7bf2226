"""Why a ColBERT found a document: for every vector of the query the document token that answers it best.

The similarities are the terms of MaxSim's sum, so they add up to the document's score in an exact index.

Shapes: n tokens of the query, m tokens of the document, d vector width.
Source: ColBERT, arXiv:2004.12832, equation 3 and its figure on which tokens meet.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import tokenizers
from tokenizers import decoders

from encoder import Tokenizer
from retrieval.colbert import ColBERT
from retrieval.encoding import clean
from retrieval.records import Role

_SENTENCEPIECE_SPACE = "\u2581"
_NO_CHARACTER = "\ufffd"


class TokenMatch(NamedTuple):
    """A token of the query and what it met.

    Attributes:
        query_token: The token as text; special and expansion tokens by their names.
        document_token: The document's token with the highest similarity, of several the first.
        similarity: Theirs, -1 to 1.
    """

    query_token: str
    document_token: str
    similarity: float


def token_matches(model: ColBERT, query: str, document: str) -> list[TokenMatch]:
    """What every vector of a query meets in a document, in the order of the query.

    Args:
        model: Encodes both.
        query: Its text.
        document: Its text, the title joined in. Tokens of the skiplist have no vector and are never met.

    Returns:
        n matches, expansion tokens included; empty where the document has no vector at all.
    """
    queries, documents = model.encode([query], "query").vectors[0], model.encode([document], "document").vectors[0]
    if not len(documents):
        return []
    similarities = queries @ documents.T  # (n, m)
    asked, answers = token_texts(model, query, "query"), token_texts(model, document, "document")
    best = similarities.argmax(axis=1).tolist()
    return [TokenMatch(asked[row], answers[column], float(similarities[row, column])) for row, column in enumerate(best)]


def token_texts(model: ColBERT, text: str, role: Role) -> list[str]:
    """The tokens that a text's vectors stand for, readable, in the order of the vectors.

    A byte-level token is text again, without the space before the word; a WordPiece keeps its ``##``; special tokens and prefixes go
    by their names, such as ``[CLS]``, ``[Q]`` and ``[MASK]``.

    Args:
        model: Its tokenizer and settings decide.
        text: A query or a document.
        role: Which prefix, length, expansion and skiplist apply.
    """
    settings, tokenizer = model.settings.colbert, model.tokenizer
    prefix = settings.query_prefix if role == "query" else settings.document_prefix
    length = settings.query_length if role == "query" else settings.document_length
    prompt = model.settings.query_prompt if role == "query" else model.settings.document_prompt
    ids = tokenizer.encode(clean([text], prompt=prompt, lower_case=model.settings.lower_case), max_length=length - bool(prefix)).ids[0]
    if (inserted := tokenizer.token_id(prefix) if prefix else None) is not None:
        ids = [*ids[:1], inserted, *ids[1:]]
    if role == "query":
        expansion = tokenizer.special_id("mask") if settings.query_expansion else None
        ids = ids if expansion is None else ids + [expansion] * ((settings.expanded_length or length) - len(ids))
    else:
        # As in the model: a word that is no single token stands for [UNK].
        known = [tokenizer.token_id(word) for word in settings.skiplist]
        skipped = {tokenizer.special_id("unk") if token is None else token for token in known}
        ids = [token for token in ids if token not in skipped]
    readable = _vocabulary(tokenizer, len(tokenizer))
    return [readable(token) for token in ids]


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, size: int) -> Callable[[int], str]:
    """Id to readable text. Reading the rules takes a tenth of a second; ``size`` tells when a token was added since."""
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
        if _NO_CHARACTER in word:  # part of a character's bytes has no text of its own
            return raw
        return word.strip() or repr(word)

    return readable
