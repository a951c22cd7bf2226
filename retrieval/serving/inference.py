"""Embedding and re-ranking of texts in a request, in the forms of OpenAI, Jina, Cohere, vLLM and text-embeddings-inference.

Every served model answers under the name of its retriever. Concurrent requests to a model are encoded in one batch, as searches are.

Sources: the references of OpenAI's embeddings, of Jina's and Cohere's rerank, and of text-embeddings-inference (``/embed``, ``/rerank``).
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Discriminator, Field, Tag

from quiver.encoder.errors import InputError
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import comparable
from quiver.retrieval.models.packed_maxsim import maxsim_packed
from quiver.retrieval.records import DenseVectors, Role
from quiver.retrieval.search.retrievers import SharedModel
from quiver.retrieval.serving.retrievers import Batcher, Retriever
from quiver.retrieval.serving.schemas import CLOSED, Count, Filled, Flag, Limits, NonBlankText, RequestError, Text, not_too_many

TokenIds: TypeAlias = Filled[Annotated[int, Field(strict=True)]]


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

    __pydantic_config__: ClassVar[dict[str, Any]] = CLOSED

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


@dataclass(frozen=True)
class EmbedRequest:
    """Texts to embed, as text-embeddings-inference takes them.

    Attributes:
        inputs: A text or texts.
        normalize: Scale vectors to length 1.
        truncate: Truncate long texts; otherwise a request with one is refused.
        truncation_direction: Which end of long texts is cut. Only the right one can be: with Left, a request with one is refused.
        prompt_name: Prompt of the model to put before the texts. Default: document.
        dimensions: Width to which vectors are cut.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CLOSED

    inputs: Text | Filled[Text]
    normalize: Flag = True
    truncate: Flag = True
    prompt_name: Literal["document", "query"] = "document"
    dimensions: Count | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"


@dataclass(frozen=True)
class TextDocument:
    """Text of a document to re-rank; other fields are ignored."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "ignore"}

    text: Text


@dataclass(frozen=True)
class RerankRequest:
    """Documents to order by their relevance to a query, as Jina, Cohere and vLLM take them.

    Attributes:
        query: Text of the query.
        documents: Texts, or objects with a text.
        model: Name of a retriever, or of its model. Default: the first ColBERT model, otherwise the first model.
        top_n: Number of documents to return. Default: all.
        return_documents: Return the texts too.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CLOSED

    query: NonBlankText
    documents: Filled[Text | TextDocument]
    model: Text | None = None
    top_n: Count | None = None
    return_documents: Flag = True


@dataclass(frozen=True)
class TextsRequest:
    """Texts to order by their relevance to a query, as text-embeddings-inference takes them.

    Attributes:
        query: Text of the query.
        texts: The texts.
        raw_scores: For a ColBERT model: return the sum over the tokens of the query instead of their mean.
        return_text: Return the texts too.
        truncate: Truncate long texts; otherwise a request with one is refused.
        truncation_direction: Which end of long texts is cut. Only the right one can be: with Left, a request with one is refused.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CLOSED

    query: NonBlankText
    texts: Filled[Text]
    raw_scores: Flag = False
    return_text: Flag = False
    truncate: Flag = True
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"


def _given(body: Any) -> Any:
    """A body without its nulls, by which clients say that they leave the choice to the service."""
    body = not_too_many(body)
    return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


def _known(body: Any) -> Any:
    """A body without the fields that are not this service's, such as Cohere's ``max_tokens_per_doc``."""
    known = {each.name for each in fields(RerankRequest)}
    return {name: value for name, value in _given(body).items() if name in known} if isinstance(body, dict) else body


def _form(body: Any) -> str:
    return "documents" if isinstance(body, RerankRequest) or (isinstance(body, dict) and "texts" not in body) else "texts"


EmbeddingsBody: TypeAlias = Annotated[EmbeddingsRequest, BeforeValidator(_given)]
EmbedBody: TypeAlias = Annotated[EmbedRequest, BeforeValidator(_given)]
RerankBody: TypeAlias = Annotated[RerankRequest, BeforeValidator(_given)]
CohereBody: TypeAlias = Annotated[RerankRequest, BeforeValidator(_known)]
AnyRerankBody: TypeAlias = Annotated[
    Annotated[TextsRequest, Tag("texts")] | Annotated[RerankRequest, Tag("documents")], Discriminator(_form), BeforeValidator(_given)
]


@dataclass(frozen=True, slots=True)
class RerankResult:
    """A re-ranked document: its position in the request, and its score."""

    index: int
    relevance_score: float
    document: TextDocument | None = None


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

    Attributes:
        id: Name in requests: that of its retriever.
        created: When the service started, in seconds since 1970.
        root: Folder or hub id of the model.
        kind: dense (embeds and re-ranks) or colbert (re-ranks).
        dimensions: Width of a vector.
        max_model_len: Longest document, in tokens.
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

    @property
    def tokenized(self) -> bool:
        """Whether these are token ids."""
        return not isinstance(self.texts[0], str)


@dataclass(frozen=True)
class Pairs:
    """A query and the texts to score for it."""

    query: str
    texts: tuple[str, ...]

    def __len__(self) -> int:
        return 1 + len(self.texts)


@dataclass(frozen=True)
class Encoded:
    """Vectors (B, d) or scores (B,) of a request, the number of its tokens, and how many of its texts were truncated.

    Attributes:
        values: Vectors (B, d) or scores (B,), float32.
        tokens: Number of tokens after truncation.
        truncated: Number of truncated texts.
        terms: Number of query vectors whose similarities a score sums; 1 for a model with one vector per text.
    """

    values: NDArray[np.float32]
    tokens: int
    truncated: int
    terms: int = 1


class TextModel:
    """A served model that encodes the texts of requests, those of concurrent requests in one batch.

    Args:
        name: Name in requests.
        retriever: A retriever of an index of the model.
        shared: The model.
        threads: Executor for batches.
        limits: Limits of the queue.

    Attributes:
        name: Name in requests.
        source: Name of the model for people.
        shared: The model.
    """

    def __init__(self, retriever: Retriever, shared: SharedModel, threads: Executor, limits: Limits) -> None:
        self.name = retriever.name
        self.source = retriever.info().model
        self.shared = shared
        # Forward passes run one at a time, so a second worker would only make smaller batches. A batch is at most two full requests.
        size = {"workers": 1, "largest": 2 * limits.texts, "room": 8 * limits.texts}
        self._encoding: Batcher[Texts, Encoded] = Batcher(self._encode, threads, **size, observe=lambda texts: None)
        self._scoring: Batcher[Pairs, Encoded] = Batcher(self._score, threads, **size, observe=lambda texts: None)

    async def encode(self, texts: Texts) -> Encoded:
        """Encode texts to vectors (B, d).

        Raises:
            RequestError: 422: token ids are not the model's; 429: too many texts are waiting.
        """
        return await self._encoding.ask(texts)

    async def score(self, pairs: Pairs) -> Encoded:
        """Score texts for a query, (B,).

        Raises:
            RequestError: 429: too many texts are waiting.
        """
        return await self._scoring.ask(pairs)

    def _encode(self, work: Sequence[Texts]) -> list[Encoded | Exception]:
        found: dict[int, Encoded | Exception] = {}
        for role in ("document", "query"):
            members = [number for number, each in enumerate(work) if each.role == role and not each.tokenized]
            if members:
                encoding = self.shared.encode_texts([str(text) for number in members for text in work[number].texts], role)
                for number, rows in zip(members, _consecutive([len(work[number]) for number in members]), strict=True):
                    tokens = encoding.tokens
                    found[number] = Encoded(encoding.vectors[rows], int(tokens.tokens[rows].sum()), int(tokens.truncated[rows].sum()))
        for number, each in enumerate(work):
            if each.tokenized:
                found[number] = self._encode_ids(each)
        return [found[number] for number in range(len(work))]

    def _encode_ids(self, work: Texts) -> Encoded | Exception:
        model = self.shared.model
        if not isinstance(model, BiEncoder):
            return RequestError(422, "invalid_request", "this model encodes texts, not token ids")
        ids = [[int(each) for each in text] for text in work.texts]
        try:
            found = []
            for piece in self.shared.pieces([*map(len, ids)]):
                with self.shared.lock.last():
                    found.append(model.encode_token_ids(ids[piece]))
            return Encoded(np.concatenate(found), sum(map(len, ids)), 0)
        except InputError as error:
            return RequestError(422, "invalid_request", str(error))

    def _score(self, work: Sequence[Pairs]) -> list[Encoded | Exception]:
        """Score the texts of several requests: each distinct text is encoded once."""
        place = {text: row for row, text in enumerate(dict.fromkeys(text for each in work for text in each.texts))}
        queries = self.shared.encode_texts([each.query for each in work], "query")
        documents = self.shared.encode_texts(list(place), "document")
        counts, lost = documents.tokens.tokens, documents.tokens.truncated
        found: list[Encoded | Exception] = []
        for number, each in enumerate(work):
            rows = [place[text] for text in each.texts]
            query = queries.vectors[number]
            if isinstance(self.shared.model, ColBERT):
                chosen = [documents.vectors[row] for row in rows]
                offsets = np.cumsum([0, *map(len, chosen)], dtype=np.int64)
                scores, terms = maxsim_packed([query], np.concatenate(chosen), offsets)[0], len(query)
            else:
                card = self.shared.card
                scores, terms = comparable(documents.vectors[rows], card) @ comparable(query[None], card)[0], 1
            tokens = int(queries.tokens.tokens[number]) + int(counts[rows].sum())
            found.append(Encoded(scores, tokens, int(queries.tokens.truncated[number]) + int(lost[rows].sum()), terms))
        return found


def _consecutive(sizes: Sequence[int]) -> list[slice]:
    """Consecutive slices of given sizes."""
    ends = np.cumsum([0, *sizes]).tolist()
    return [slice(first, last) for first, last in pairwise(ends)]


class TextModels:
    """The models of a service, by the names of their retrievers.

    Args:
        retrievers: Retrievers by name.
        threads: Executor for batches.
        limits: Limits of a request and of the queues.
    """

    def __init__(self, retrievers: Mapping[str, Retriever], threads: Executor, limits: Limits) -> None:
        self._limits = limits
        self._started = int(time.time())
        self._models: dict[str, TextModel] = {}
        for name, retriever in retrievers.items():
            if retriever.model is not None:
                self._models[name] = TextModel(retriever, retriever.model, threads, limits)

    def listed(self) -> ModelList:
        """Describe the models."""
        return ModelList([self.describe(each) for each in self._models.values()])

    def describe(self, model: TextModel) -> ServedModel:
        """Describe a model."""
        card = model.shared.card
        kind: Literal["dense", "colbert"] = "dense" if card.kind == "dense" else "colbert"  # an index of BM25 has no model
        return ServedModel(model.name, self._started, model.source, kind, card.dim, card.document_length)

    def find(self, name: str | None, *, dense: bool) -> TextModel:
        """Return a model by its name or that of its retriever.

        Args:
            name: The name. None for the first bi-encoder, or with ``dense`` false for the first ColBERT model, if there is one.
            dense: Whether the model has to embed texts.

        Raises:
            RequestError: 404: there is no such model; 422: it does not embed texts.
        """
        all_models = list(self._models.values())
        if name is None:
            preferred = [each for each in all_models if (each.shared.card.kind == "dense") == dense]
            named = preferred or ([] if dense else all_models)
        else:
            named = [each for each in all_models if each.name == name] or [each for each in all_models if each.source == name]
        if not named:
            able = [each.name for each in all_models if not dense or each.shared.card.kind == "dense"]
            known = f"the models are {', '.join(able)}" if able else "this service has none that can do this"
            raise RequestError(404, "unknown_model", f"no such model; {known}")
        if dense and named[0].shared.card.kind != "dense":
            raise RequestError(
                422, "invalid_request", f"{named[0].name} is a ColBERT model, which has a vector per token; it re-ranks only"
            )
        return named[0]

    async def embeddings(self, request: EmbeddingsRequest) -> EmbeddingsAnswer:
        """Embed texts; see `EmbeddingsRequest`.

        Raises:
            RequestError: There is no such model, or the request violates a limit.
        """
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
        vectors = _cut(comparable(encoded.values, model.shared.card), request.dimensions)
        if request.dimensions is not None:
            vectors = comparable(vectors, model.shared.card)
        rows = [_base64(row) for row in vectors] if request.encoding_format == "base64" else vectors.tolist()
        data = [Embedding(number, row) for number, row in enumerate(rows)]
        return EmbeddingsAnswer(data, request.model, Usage(encoded.tokens, encoded.tokens))

    async def embed(self, request: EmbedRequest) -> list[list[float]]:
        """Embed texts; see `EmbedRequest`.

        Raises:
            RequestError: There is no bi-encoder, the request violates a limit, or a text is too long.
        """
        texts = (request.inputs,) if isinstance(request.inputs, str) else tuple(request.inputs)
        self._check_count(texts)
        model = self.find(None, dense=True)
        encoded = await model.encode(Texts(texts, request.prompt_name))
        _check_truncated(encoded, request)
        vectors = _cut(encoded.values, request.dimensions)
        if request.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)
        rows: list[list[float]] = vectors.tolist()
        return rows

    async def rerank(self, request: RerankRequest) -> RerankAnswer:
        """Re-rank documents; see `RerankRequest`.

        Raises:
            RequestError: There is no such model, or the request violates a limit.
        """
        texts = tuple(each if isinstance(each, str) else each.text for each in request.documents)
        model, encoded, order = await self._ranked(request.query, texts, request.model)
        scores = (encoded.values / encoded.terms).tolist()
        results = [
            RerankResult(row, scores[row], TextDocument(texts[row]) if request.return_documents else None) for row in order[: request.top_n]
        ]
        return RerankAnswer(f"rerank-{uuid.uuid4().hex}", request.model or model.name, results, TotalUsage(encoded.tokens))

    async def rank_texts(self, request: TextsRequest) -> list[TextRank]:
        """Re-rank texts; see `TextsRequest`.

        Raises:
            RequestError: There is no model, the request violates a limit, or a text is too long.
        """
        texts = tuple(request.texts)
        _, encoded, order = await self._ranked(request.query, texts, None)
        _check_truncated(encoded, request)
        scores = (encoded.values if request.raw_scores else encoded.values / encoded.terms).tolist()
        return [TextRank(row, scores[row], texts[row] if request.return_text else None) for row in order]

    async def _ranked(self, query: str, texts: tuple[str, ...], name: str | None) -> tuple[TextModel, Encoded, list[int]]:
        """The scores of texts, and their positions, best first; equal scores in the order of the request."""
        self._check_count(texts)
        if len(query) > (most := self._limits.query_characters):
            raise RequestError(422, "beyond_limit", f"characters per query: at most {most:,}, got {len(query):,}")
        model = self.find(name, dense=False)
        encoded = await model.score(Pairs(query, texts))
        lowest = np.float32(-model.shared.card.query_length)
        values = np.where(np.isfinite(encoded.values), encoded.values, lowest)  # a text without vectors has no score
        order = np.argsort(-values, kind="stable").tolist()
        return model, Encoded(values, encoded.tokens, encoded.truncated, encoded.terms), order

    def _check_count(self, texts: Sequence[object]) -> None:
        if len(texts) > (most := self._limits.texts):
            raise RequestError(422, "beyond_limit", f"texts per request: at most {most:,}, got {len(texts):,}")


def _cut(vectors: DenseVectors, width: int | None) -> DenseVectors:
    if width is not None and width > vectors.shape[1]:
        raise RequestError(422, "invalid_request", f"dimensions: at most {vectors.shape[1]:,}, the width of this model, got {width:,}")
    return vectors[:, :width]


def _check_truncated(encoded: Encoded, request: EmbedRequest | TextsRequest) -> None:
    from_left = request.truncation_direction.lower() == "left"
    if encoded.truncated and (from_left or not request.truncate):
        remedy = "truncation_direction: Right" if request.truncate else "truncate: true"
        raise RequestError(
            422, "too_long", f"{encoded.truncated} of the texts are longer than the model reads; shorten them, or send {remedy}"
        )


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
