"""What requests and answers look like: the types that FastAPI checks bodies against and writes the OpenAPI schema from.

Plain dataclasses; what is limited by an option of the command line is limited by `quiver.retrieval.serving.limits`, and its bounds are put
into the schema when the service is made. Scalars are strict: a number in quotes is not a number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quiver.retrieval.serving.limits import Limits

Text = Annotated[str, Field(strict=True)]
# Something that is not white space.
Said = Annotated[str, Field(strict=True, min_length=1, pattern=r"\S")]
Count = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
Scalar = (
    Annotated[bool, Field(strict=True)]
    | Annotated[int, Field(strict=True)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | Annotated[str, Field(strict=True)]
)
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
Effort = Literal["exact", "balanced", "fast"]
Span = tuple[int, int]

_CLOSED: dict[str, Any] = {"extra": "forbid"}


@dataclass(frozen=True)
class SearchRequest:
    """One query.

    Attributes:
        query: Its text.
        k: Hits wanted.
        retriever: Name of the retriever; by default the first.
        filter: A condition or several that must all hold, such as ``year>=2015``, ``lang in en,de`` or ``city="New York"``: fields and
            values with spaces or operators stand in double quotes.
        effort: How much of the index is looked at; by default balanced.
        target_recall: Or as little as was measured to find this share of the best.
        explain: Say of every hit which tokens or words met.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _CLOSED

    query: Said
    k: Count = 10
    retriever: Text | None = None
    filter: Text | list[Text] | None = None
    effort: Effort | None = None
    target_recall: Share | None = None
    explain: Flag = False


@dataclass(frozen=True)
class BatchRequest:
    """Several queries with the same options; see `SearchRequest`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CLOSED

    queries: Annotated[list[Said], Field(min_length=1)]
    k: Count = 10
    retriever: Text | None = None
    filter: Text | list[Text] | None = None
    effort: Effort | None = None
    target_recall: Share | None = None
    explain: Flag = False


@dataclass(frozen=True)
class NewDocument:
    """A document to add.

    Attributes:
        id: Its id, for ever.
        text: What is searched.
        title: Put before the text where the index was built so.
        metadata: Field -> value or values, to filter by.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _CLOSED

    id: Said
    text: Text
    title: Text = ""
    metadata: dict[Text, Scalar | list[Scalar]] | None = None


@dataclass(frozen=True)
class AddRequest:
    """Documents to add.

    Attributes:
        documents: At least one.
        replace: Documents whose ids are in the index take the place of those.
        retriever: To whose index; by default the first's.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = _CLOSED

    documents: Annotated[list[NewDocument], Field(min_length=1)]
    replace: Flag = False
    retriever: Text | None = None


@dataclass(frozen=True)
class DeleteRequest:
    """Documents to delete by their ids; see `AddRequest`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CLOSED

    ids: Annotated[list[Said], Field(min_length=1)]
    retriever: Text | None = None


@dataclass(frozen=True)
class TokenSpan:
    """A token and where it stands in its text: first character, and the one behind the last; null for what the text does not have."""

    token: str
    span: Span | None


@dataclass(frozen=True)
class Meeting:
    """A token of the query and the token of the passage that is most similar to it, by their places in the lists.

    Attributes:
        query: Place of the query's token.
        passage: Place of the passage's.
        score: What it adds to the hit's score.
    """

    query: int
    passage: int
    score: float


@dataclass(frozen=True)
class WordPart:
    """What a word of the query adds to a BM25 score; 0 where the passage lacks it."""

    word: str
    score: float


@dataclass(frozen=True)
class HitExplanation:
    """Why a hit has its score.

    Attributes:
        kind: ``tokens`` for a ColBERT, ``words`` for BM25, ``similarity`` for one vector a text.
        score: The score that is explained; null where the document has no vector.
        text: The passage as it was encoded, title joined in, which the passage's spans are of; null where it is not kept.
        query: The query's tokens, in order; spans are of the query.
        passage: The passage's tokens, in order.
        matches: One for each token of the query; their scores add up to the hit's.
        words: For BM25, in the order of the query; their scores add up to the hit's.
    """

    kind: Literal["tokens", "words", "similarity"]
    score: float | None
    text: str | None = None
    query: list[TokenSpan] = field(default_factory=list)
    passage: list[TokenSpan] = field(default_factory=list)
    matches: list[Meeting] = field(default_factory=list)
    words: list[WordPart] = field(default_factory=list)


@dataclass(frozen=True)
class Hit:
    """A document that was found; title, text and metadata are null where the index keeps no texts."""

    id: str
    score: float
    title: str | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = None
    explanation: HitExplanation | None = None


@dataclass(frozen=True)
class Milliseconds:
    """Where the time went: queries that came together were encoded together, and each was given the time of all."""

    encode: float
    search: float
    total: float


@dataclass(frozen=True)
class SearchAnswer:
    """What a query found, best first.

    Attributes:
        retriever: Who answered.
        hits: At most k.
        milliseconds: Where the time went.
        generation: The committed state of the index that was searched.
        partial: Whether a part of the index could not be asked.
        warning: Why this ranking cannot be compared with the first retriever's: its index holds other documents. Null where it can.
    """

    retriever: str
    hits: list[Hit]
    milliseconds: Milliseconds
    generation: int
    partial: bool = False
    warning: str | None = None


@dataclass(frozen=True)
class BatchAnswer:
    """An answer a query, in the order of the queries."""

    results: list[SearchAnswer]


@dataclass(frozen=True)
class StoredDocument:
    """A document of an index; title and text are null where texts are not kept."""

    id: str
    title: str | None
    text: str | None
    metadata: dict[str, Any] | None
    retriever: str
    generation: int


@dataclass(frozen=True)
class ChangeAnswer:
    """An index after a change.

    Attributes:
        retriever: Whose index.
        generation: The state that searches see from now on.
        documents: How many it holds.
    """

    retriever: str
    generation: int
    documents: int


@dataclass(frozen=True)
class RetrieverInfo:
    """A retriever.

    Attributes:
        name: What requests call it.
        kind: One vector a text, one a token, or words.
        model: What encodes; BM25's parameters for words.
        documents: Documents that can be found.
        generation: The committed state of the index.
        fields: What can be filtered by, each with the types of its values.
        explains: Whether it can say which tokens or words met.
        stores_text: Whether hits have their texts.
        efforts: What a request may ask for; none where there is nothing to choose.
    """

    name: str
    kind: Literal["dense", "colbert", "bm25"]
    model: str
    documents: int
    generation: int
    fields: dict[str, list[str]]
    explains: bool
    stores_text: bool
    efforts: list[str]


@dataclass(frozen=True)
class Info:
    """What the service offers.

    Attributes:
        retrievers: The first one is the default.
        limits: See `quiver.retrieval.serving.limits.Limits`.
        writable: Whether documents can be added and deleted, with a token.
        version: Quiver's.
    """

    retrievers: list[RetrieverInfo]
    limits: Limits
    writable: bool
    version: str


@dataclass(frozen=True)
class Status:
    """A word about the service."""

    status: str


@dataclass(frozen=True)
class Problem:
    """What is wrong: a code for programs, a message for people."""

    code: str
    message: str


@dataclass(frozen=True)
class ErrorAnswer:
    """Every answer that is not a success."""

    error: Problem
