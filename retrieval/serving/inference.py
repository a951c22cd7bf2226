"""Embedding and re-ranking of texts in a request, in the forms of OpenAI, Jina, Cohere, vLLM and text-embeddings-inference.

Every served model answers under the name of its retriever. Concurrent requests to a model are encoded in one batch, as searches are.

Sources: the references of OpenAI's embeddings, of Jina's and Cohere's rerank, and of text-embeddings-inference (``/embed``, ``/rerank``).
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag, with_config

from quiver.encoder.errors import InputError
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.encoding import comparable, maxsim_packed
from quiver.retrieval.records import DenseVectors, Role
from quiver.retrieval.search.retrievers import SharedModel
from quiver.retrieval.serving.retrievers import Batcher, ServedRetriever
from quiver.retrieval.serving.schemas import CLOSED, Bounded, Count, Filled, Flag, Limits, NonBlankText, RequestError, Text, encodable

TokenIds: TypeAlias = Filled[Annotated[int, Field(strict=True)]]


@with_config(CLOSED)
@dataclass(frozen=True)
class EmbeddingsRequest:
    """Texts to embed, as OpenAI's API takes them.

    Attributes:
        input: A text, texts, or lists of token ids of the model's own tokenizer, which are used as they are.
        model: Name of a dense retriever, or of its model.
        encoding_format: ``float`` for lists of numbers, ``base64`` for the bytes of little-endian float32 numbers.
        dimensions: Width to which vectors are cut; those of a model with cosine similarity are then scaled to length 1 again.
        input_type: Whether the texts are documents or queries, which decides the model's prompt. Default: document.
        user: Ignored.
    """

    input: Text | Filled[Text] | TokenIds | Filled[TokenIds]
    model: Text
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    input_type: Literal["document", "query"] = "document"
    user: Text | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """A vector: numbers, or text in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of tokens that were encoded, after truncation."""

    prompt_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingsAnswer:
    """One vector per text, in the order of the texts."""

    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


@with_config(CLOSED)
@dataclass(frozen=True)
class EmbedRequest:
    """Texts to embed, as text-embeddings-inference takes them.

    Attributes:
        normalize: Scale vectors to length 1.
        truncate: Truncate long texts; otherwise a request with one is refused.
        truncation_direction: Which end of long texts is cut. Only the right one can be: with Left, a request with one is refused.
        prompt_name: Prompt of the model to put before the texts. Default: document.
        dimensions: Width to which vectors are cut.
    """

    inputs: Text | Filled[Text]
    normalize: Flag = True
    truncate: Flag = True
    prompt_name: Literal["document", "query"] = "document"
    dimensions: Count | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"


@with_config(CLOSED)
@dataclass(frozen=True)
class RerankRequest:
    """Documents to order by their relevance to a query, as Jina, Cohere and vLLM take them.

    Attributes:
        documents: Texts, or objects with a text.
        model: Name of a retriever, or of its model. Default: the first ColBERT model, otherwise the first model.
        top_n: Number of documents to return. Default: all.
        return_documents: Return the texts, or the ranked fields of objects, too.
        rank_fields: Fields of objects that are joined to the text, in this order. Default: text.
        max_chunks_per_doc: Ignored, as ``max_tokens_per_doc`` is: a document is one text, which the model truncates at its own length.
        priority: Ignored.
    """

    query: NonBlankText
    documents: Filled[Text | dict[str, Any]]
    model: Text | None = None
    top_n: Count | None = None
    return_documents: Flag = True
    rank_fields: Annotated[list[Text], Field(min_length=1, max_length=20)] | None = None
    max_chunks_per_doc: Count | None = None
    max_tokens_per_doc: Count | None = None
    priority: int | None = None


@with_config(CLOSED)
@dataclass(frozen=True)
class TextsRequest:
    """Texts to order by their relevance to a query, as text-embeddings-inference takes them.

    Attributes:
        raw_scores: For a ColBERT model: return the sum over the tokens of the query instead of their mean.
        return_text: Return the texts too.
        truncate: Truncate long texts; otherwise a request with one is refused.
        truncation_direction: Which end of long texts is cut. Only the right one can be: with Left, a request with one is refused.
    """

    query: NonBlankText
    texts: Filled[Text]
    raw_scores: Flag = False
    return_text: Flag = False
    truncate: Flag = True
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"


def _form(other: str) -> Discriminator:
    """Tells a body with ``texts`` from one of another form: the name of a field of it, in brackets as a type of a union in an error."""

    def name_form(body: Any) -> str:
        return "[texts]" if isinstance(body, TextsRequest) or (isinstance(body, dict) and "texts" in body) else f"[{other}]"

    return Discriminator(name_form)


EmbeddingsBody: TypeAlias = Annotated[EmbeddingsRequest, Bounded]
EmbedBody: TypeAlias = Annotated[EmbedRequest, Bounded]
RerankBody: TypeAlias = Annotated[RerankRequest, Bounded]
AnyRerankBody: TypeAlias = Annotated[
    Annotated[TextsRequest, Tag("[texts]")] | Annotated[RerankRequest, Tag("[documents]")], _form("documents"), Bounded
]
AnyTextsBody: TypeAlias = Annotated[
    Annotated[TextsRequest, Tag("[texts]")] | Annotated[EmbedRequest, Tag("[inputs]")], _form("inputs"), Bounded
]


@dataclass(frozen=True, slots=True)
class RerankResult:
    """A re-ranked document: its position in the request, its score, and its text or the fields that were ranked."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TotalUsage:
    """Number of tokens that were encoded, after truncation."""

    total_tokens: int


@dataclass(frozen=True, slots=True)
class RerankAnswer:
    """The documents, most relevant first; scores are mean similarities of the query's tokens, or cosines or dot products of vectors."""

    id: str
    model: str
    results: list[RerankResult]
    usage: TotalUsage


@dataclass(frozen=True, slots=True)
class TextRank:
    """A re-ranked text: its position in the request, and its score."""

    index: int
    score: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model, in the form of OpenAI's list of models.

    Its id is the name of its retriever, ``root`` its folder or hub id, ``max_model_len`` its longest document in tokens, and ``created``
    when the service started, in seconds since 1970. A dense model embeds and re-ranks, a colbert one re-ranks.
    """

    id: str
    created: int
    root: str
    kind: Literal["dense", "colbert"]
    dimensions: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["quiver"] = "quiver"


@dataclass(frozen=True, slots=True)
class ModelList:
    """The served models."""

    data: list[ServedModel]
    object: Literal["list"] = "list"


@dataclass(frozen=True)
class Texts:
    """Texts to encode in one role; or lists of token ids, which are encoded as they are."""

    texts: tuple[str, ...] | tuple[tuple[int, ...], ...]
    role: Role = "document"

    def __len__(self) -> int:
        return len(self.texts)


class Encoded(NamedTuple):
    """The vectors (B, d) or token vectors of B texts, their numbers of tokens after truncation, and which were truncated, (B,)."""

    vectors: Any
    tokens: NDArray[np.integer[Any]]
    truncated: NDArray[np.bool_]


class Scores(NamedTuple):
    """Positions of texts in the order of their scores, the scores, and how many tokens of query and texts were encoded and truncated.

    Equal scores are in the order of the request. A score sums the similarities of ``terms`` vectors of the query.
    """

    order: list[int]
    values: NDArray[np.float32]
    terms: int
    tokens: int
    truncated: int


_PART = 64  # texts of a request that are queued at a time, so that others need not wait for all of them
_ROOM = 32 * _PART  # texts that wait for a model


class TextModel:
    """A served model that encodes the texts of requests, those of concurrent requests in one batch.

    Args:
        retriever: A retriever of an index of the model, under whose name requests find it.
        shared: The model.
        threads: Executor for batches.
    """

    def __init__(self, retriever: ServedRetriever, shared: SharedModel, threads: Executor) -> None:
        self.name, self.source = retriever.name, retriever.info().model
        self.shared = shared
        self._threads = threads
        # Forward passes run one at a time, so a second worker would only make smaller batches.
        self._batcher: Batcher[Texts, Encoded] = Batcher(
            self._encode_batch, threads, workers=1, largest=4 * _PART, room=_ROOM, observe=lambda texts: None
        )

    @property
    def dense(self) -> bool:
        """Whether a text has one vector, and not one per token."""
        return self.shared.card.kind == "dense"

    async def encode(self, texts: Texts, *, begun: bool = False) -> Encoded:
        """Encode texts; ``begun``: others of the request are encoded, so that it is not refused."""
        parts = [replace(texts, texts=texts.texts[first : first + _PART]) for first in range(0, len(texts), _PART)]
        found = [await self._batcher.ask(part, begun=begun or number > 0) for number, part in enumerate(parts)]
        vectors = [each.vectors for each in found]
        joined = [own for each in vectors for own in each] if isinstance(vectors[0], list) else np.concatenate(vectors)
        return Encoded(joined, np.concatenate([each.tokens for each in found]), np.concatenate([each.truncated for each in found]))

    async def score(self, query: str, texts: Sequence[str]) -> Scores:
        """Score texts for a query; each distinct text is encoded once."""
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        asked = await self.encode(Texts((query,), "query"))
        found = await self.encode(Texts(tuple(distinct)), begun=True)
        card, own = self.shared.card, asked.vectors[0]

        def compare() -> NDArray[np.float32]:
            similarities: NDArray[np.float32]
            if self.dense:
                similarities = comparable(found.vectors, card) @ comparable(own[None], card)[0]
                return similarities
            offsets = np.cumsum([0, *map(len, found.vectors)], dtype=np.int64)
            similarities = maxsim_packed([own], np.concatenate(found.vectors), offsets)[0]
            return similarities

        scores = await asyncio.get_running_loop().run_in_executor(self._threads, compare)
        rows, lowest = [distinct[text] for text in texts], np.float32(-card.query_length)
        values = np.where(np.isfinite(scores), scores, lowest)[rows]  # a text without vectors has no score
        order = np.argsort(-values, kind="stable")
        tokens, truncated = int(asked.tokens[0] + found.tokens[rows].sum()), int(asked.truncated[0] + found.truncated[rows].sum())
        return Scores(order.tolist(), values[order], 1 if self.dense else len(own), tokens, truncated)

    def _encode_batch(self, work: Sequence[Texts]) -> list[Encoded | Exception]:
        found: dict[int, Encoded | Exception] = {}
        for role in ("document", "query"):
            members = [number for number, each in enumerate(work) if each.role == role and isinstance(each.texts[0], str)]
            if not members:
                continue
            encoding, first = self.shared.encode_texts([str(text) for each in members for text in work[each].texts], role), 0
            for number in members:
                rows = slice(first, first + len(work[number]))
                found[number] = Encoded(encoding.vectors[rows], encoding.tokens.tokens[rows], encoding.tokens.truncated[rows])
                first = rows.stop
        return [found[number] if number in found else self._encode_ids(each) for number, each in enumerate(work)]

    def _encode_ids(self, work: Texts) -> Encoded | Exception:
        model, ids = self.shared.model, [[int(each) for each in text] for text in work.texts]
        if not isinstance(model, BiEncoder):
            return RequestError(422, "invalid_request", "this model encodes texts, not token ids")
        lengths, found = [*map(len, ids)], []
        try:
            for piece in self.shared.pieces(lengths):
                with self.shared.lock:
                    found.append(model.encode_token_ids(ids[piece]))
        except InputError as error:
            return RequestError(422, "invalid_request", str(error))
        return Encoded(np.concatenate(found), np.array(lengths), np.zeros(len(ids), bool))


class TextModels:
    """The models of a service, by the names of their retrievers."""

    def __init__(self, retrievers: Mapping[str, ServedRetriever], threads: Executor, limits: Limits) -> None:
        self._limits, self._started = limits, int(time.time())
        self._models = [TextModel(each, each.model, threads) for each in retrievers.values() if each.model is not None]

    def listed(self) -> ModelList:
        """Describe the models."""
        return ModelList([self.describe(each) for each in self._models])

    def describe(self, model: TextModel) -> ServedModel:
        """Describe a model."""
        card = model.shared.card
        return ServedModel(model.name, self._started, model.source, "dense" if model.dense else "colbert", card.dim, card.document_length)

    def find(self, name: str | None, *, dense: bool) -> TextModel:
        """A model by its name or that of its retriever; for None the first one, of the kind that embeds (``dense``) or re-ranks better."""
        if name is None:
            named = [each for each in self._models if each.dense == dense] or ([] if dense else self._models)
        else:
            named = [each for each in self._models if each.name == name] or [each for each in self._models if each.source == name]
        if not named:
            able = [each.name for each in self._models if not dense or each.dense]
            known = f"the models are {', '.join(able)}" if able else "this service has none that can do this"
            raise RequestError(404, "unknown_model", f"no such model; {known}")
        if dense and not named[0].dense:
            raise RequestError(
                422, "invalid_request", f"{named[0].name} is a ColBERT model, which has a vector per token; it re-ranks only"
            )
        return named[0]

    async def embeddings(self, request: EmbeddingsRequest) -> EmbeddingsAnswer:
        """Embed texts; see `EmbeddingsRequest`."""
        given = request.input
        model = self.find(request.model, dense=True)
        if isinstance(given, str):
            texts: Any = (given,)
        elif isinstance(given[0], int):
            texts = (tuple(given),)
        else:
            texts = tuple(each if isinstance(each, str) else tuple(each) for each in given)
        self._check_count(texts)
        encoded = await model.encode(Texts(texts, request.input_type))
        vectors = _cut_vectors(comparable(encoded.vectors, model.shared.card), request.dimensions)
        if request.dimensions is not None:
            vectors = comparable(vectors, model.shared.card)
        rows = vectors.tolist()
        if request.encoding_format == "base64":
            rows = [base64.b64encode(row.astype("<f4").tobytes()).decode("ascii") for row in vectors]
        data = [Embedding(number, row) for number, row in enumerate(rows)]
        tokens = int(encoded.tokens.sum())
        return EmbeddingsAnswer(data, request.model, Usage(tokens, tokens))

    async def embed(self, request: EmbedRequest) -> list[list[float]]:
        """Embed texts; see `EmbedRequest`."""
        texts = (request.inputs,) if isinstance(request.inputs, str) else tuple(request.inputs)
        self._check_count(texts)
        model = self.find(None, dense=True)
        encoded = await model.encode(Texts(texts, request.prompt_name))
        _check_truncated(int(encoded.truncated.sum()), request)
        vectors = _cut_vectors(encoded.vectors, request.dimensions)
        if request.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        rows: list[list[float]] = vectors.tolist()
        return rows

    async def rerank(self, request: RerankRequest) -> RerankAnswer:
        """Re-rank documents; see `RerankRequest`."""
        self._check_count(request.documents)
        names = request.rank_fields or ["text"]
        documents = [_select_ranked_fields(each, names, place) for place, each in enumerate(request.documents)]
        texts = [" ".join(map(str, each.values())) for each in documents]
        model, found = await self._score(request.query, texts, request.model)
        ranked = list(zip(found.order, (found.values / found.terms).tolist(), strict=True))[: request.top_n]
        results = [RerankResult(row, score, documents[row] if request.return_documents else None) for row, score in ranked]
        return RerankAnswer(f"rerank-{uuid.uuid4().hex}", request.model or model.name, results, TotalUsage(found.tokens))

    async def rank_texts(self, request: TextsRequest) -> list[TextRank]:
        """Re-rank texts; see `TextsRequest`."""
        self._check_count(request.texts)
        _, found = await self._score(request.query, request.texts, None)
        _check_truncated(found.truncated, request)
        scores = (found.values if request.raw_scores else found.values / found.terms).tolist()
        texts = [request.texts[row] if request.return_text else None for row in found.order]
        return list(map(TextRank, found.order, scores, texts))

    async def _score(self, query: str, texts: Sequence[str], name: str | None) -> tuple[TextModel, Scores]:
        if len(query) > (most := self._limits.query_characters):
            raise RequestError(422, "beyond_limit", f"characters per query: at most {most:,}, got {len(query):,}")
        model = self.find(name, dense=False)
        return model, await model.score(query, texts)

    def _check_count(self, texts: Sequence[object]) -> None:
        if len(texts) > (most := self._limits.texts):
            raise RequestError(422, "beyond_limit", f"texts per request: at most {most:,} (--max-texts), got {len(texts):,}")


def _select_ranked_fields(document: str | dict[str, Any], names: Sequence[str], place: int) -> dict[str, Any]:
    """The fields that a document is ranked by; of a text, the text."""
    if isinstance(document, str):
        return {"text": document}
    chosen = {name: document[name] for name in names if document.get(name) is not None}
    if not chosen:
        raise RequestError(422, "invalid_request", f"body.documents.{place}: has none of the fields to rank: {', '.join(names)}")
    for name, value in chosen.items():
        if not isinstance(value, str | int | float) or value in (math.inf, -math.inf) or value != value:
            raise RequestError(422, "invalid_request", f"body.documents.{place}.{name}: must be text or a number")
        try:
            encodable(str(value))
        except ValueError as error:
            raise RequestError(422, "invalid_request", f"body.documents.{place}.{name}: {error}") from error
    return chosen


def _cut_vectors(vectors: DenseVectors, width: int | None) -> DenseVectors:
    if width is not None and width > vectors.shape[1]:
        raise RequestError(422, "invalid_request", f"dimensions: at most {vectors.shape[1]:,}, the width of this model, got {width:,}")
    return vectors[:, :width]


def _check_truncated(truncated: int, request: EmbedRequest | TextsRequest) -> None:
    from_left = request.truncation_direction.lower() == "left"
    if truncated and (from_left or not request.truncate):
        remedy = "truncation_direction: Right" if request.truncate else "truncate: true"
        raise RequestError(422, "too_long", f"{truncated} of the texts are longer than the model reads; shorten them, or send {remedy}")
