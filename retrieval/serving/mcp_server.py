"""A server of the Model Context Protocol over standard input and output: agents search the indexes of a `Service` and read documents.

Needs the extra ``mcp``. Searches go through `quiver.retrieval.serving.application.search`, so that limits, filters, fusion and newer
generations are those of the HTTP service. Source: https://modelcontextprotocol.io/specification.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field, ValidationError

from quiver.encoder.environment import installed_version
from quiver.retrieval.index import IndexReader
from quiver.retrieval.serving.application import search
from quiver.retrieval.serving.schemas import (
    Count,
    List,
    NonBlankText,
    Offset,
    RequestError,
    SearchRequest,
    Text,
    describe_unknown,
    wrong_values,
)
from quiver.retrieval.serving.service import Service

_EXCERPT = 1200  # characters of a hit's text: about as many words as an agent can judge ten hits by
_PAGE = 20_000  # characters of a document that one call reads
_VALUES = 20  # values that a field is described by
_PASSAGES = 20  # passages that a group is shown by

Words = Annotated[NonBlankText, Field(description="What to search for, in plain words.")]
HitCount = Annotated[Count, Field(description="Number of hits.", le=100)]
Skip = Annotated[Offset, Field(description="Number of leading hits to skip, for more of them.")]
Conditions = Annotated[
    Text | List[Text] | None,
    Field(
        description="SQL condition, or list of conditions that all hold, such as year >= 2015 AND lang IN ('en', 'de'), file LIKE"
        " 'guides/%' or array_contains(tags, 'api'); list_fields names the fields and their types."
    ),
]
GroupBy = Annotated[
    Text | None,
    Field(
        description="Field, such as file or document, whose values are ranked, each by its best passage: every file or document once; k"
        " and offset count values. list_fields names the fields."
    ),
]
RetrieverName = Annotated[Text | None, Field(description="Name of a retriever, see list_fields. Default: the first.")]
DocumentId = Annotated[Text, Field(description="Id of a hit.", min_length=1)]
Start = Annotated[Offset, Field(description="Number of leading characters to skip, for the rest of a long document.")]


@dataclass(frozen=True)
class FoundDocument:
    """A hit: the first characters of its text, and whether there are more.

    With group_by, the best passage of a group: the value of the field, the ids and scores of the best passages that were found, and
    whether more were found.
    """

    id: str
    score: float
    title: str | None
    text: str | None
    more_text: bool
    fields: dict[str, Any]
    group: str | None
    passages: dict[str, float] | None
    more_passages: bool


@dataclass(frozen=True)
class FoundDocuments:
    """Hits, best first, and the number of documents that match the filter; if there are no hits, why, also if the search was refused.

    Partial: a search with group_by found fewer groups than asked for in the passages that it may search, and there may be more.
    """

    hits: list[FoundDocument]
    matching: int
    retriever: str
    partial: bool
    warning: str | None
    nothing_found: str | None


@dataclass(frozen=True)
class ReadDocument:
    """A part of a document, and the characters of the whole."""

    id: str
    title: str | None
    text: str | None
    start: int
    characters: int
    fields: dict[str, Any]


@dataclass(frozen=True)
class FieldDescription:
    """A field to filter by: the types of its values, the most frequent ones with their numbers of documents, and how many there are.

    A field of many numbers has its least and greatest value instead.
    """

    name: str
    types: list[str]
    values: list[tuple[bool | int | float | str, int]]
    distinct: int
    range: tuple[Any, Any] | None


@dataclass(frozen=True)
class RetrieverDescription:
    """A retriever: how it ranks, how many documents it ranks, and the fields to filter by."""

    name: str
    kind: str
    documents: int
    fields: list[FieldDescription]


class _Server(MCPServer):  # type: ignore[misc]  # typed where the extra is installed
    """Refuses arguments that a tool does not have, which the class itself leaves out: a filter by another name would filter nothing."""

    async def list_tools(self) -> list[Any]:
        """List the tools; their schemas say that there are no further arguments."""
        tools = await super().list_tools()
        return [tool.model_copy(update={"input_schema": {**tool.input_schema, "additionalProperties": False}}) for tool in tools]

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Call a tool without its arguments that are null; what it refuses is one line.

        A search that is refused has hits too, none of them: the specification demands a result of the tool's schema.
        """
        try:
            known = next((list(tool.input_schema["properties"]) for tool in await self.list_tools() if tool.name == name), None)
            if known is not None and (unknown := [each for each in arguments if each not in known]):
                raise ToolError(describe_unknown("argument", unknown[:5], known))
            return await super().call_tool(name, {each: value for each, value in arguments.items() if value is not None}, context)
        except ToolError as error:
            said: Exception = error
            if isinstance(error.__cause__, ValidationError):
                problems = [{**each, "loc": ("argument", *each["loc"])} for each in error.__cause__.errors()]
                said = ToolError("; ".join(wrong_values(problems)[:5]))
            if name != "search" or isinstance(error, UnexpectedToolError):
                raise said from error.__cause__
            found = FoundDocuments([], 0, "", False, None, str(said))
            return CallToolResult(content=[TextContent(text=str(said))], structured_content=asdict(found), is_error=True)


def create_server(service: Service, *, poll_seconds: float = 2.0) -> MCPServer:
    """Create the server with its three tools; looks for newer generations every ``poll_seconds``."""
    tools, names = _Tools(service), service.retrievers.items()
    each = ", ".join(f"{name} ({len(retriever.served.current.index):,} documents)" for name, retriever in names)
    server = _Server(
        "quiver",
        version=installed_version("quiver-retrieval") or "unknown",
        instructions=f"Search the documents of an index by meaning or words. Retrievers: {each}.",
        lifespan=lambda server: service.watched(poll_seconds),
    )
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in (tools.search, tools.read_document, tools.list_fields):
        server.tool(annotations=reads)(tool)
    return server


class _Tools:
    """The tools; their docstrings are what an agent reads."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def search(
        self,
        query: Words,
        k: HitCount = 5,
        filter: Conditions = None,
        offset: Skip = 0,
        retriever: RetrieverName = None,
        group_by: GroupBy = None,
    ) -> FoundDocuments:
        """Search documents. Returns the best hits with the beginning of their texts; read_document reads the rest."""
        try:
            # The first page of groups is not searched as deep as all pages together: that can be every passage of the index.
            skipped = None if group_by is not None and not offset else offset
            (found,) = await search(self._service, SearchRequest(query, k, skipped, retriever, filter, group_by=group_by))
        except RequestError as error:
            raise ToolError(str(error)) from error
        hits = []
        for hit in found.hits:
            text, passages = hit.text, hit.passages
            shown, more = (None, False) if text is None else (text[:_EXCERPT], len(text) > _EXCERPT)
            best = None if passages is None else dict(islice(passages.items(), _PASSAGES))
            more_passages = len(passages or ()) > _PASSAGES
            metadata = dict(hit.metadata or {})
            hits.append(FoundDocument(hit.id, hit.score, hit.title or None, shown, more, metadata, hit.group, best, more_passages))
        return FoundDocuments(hits, found.matching, found.retriever, found.partial, found.warning, found.nothing_found)

    async def read_document(self, id: DocumentId, start: Start = 0, retriever: RetrieverName = None) -> ReadDocument:  # noqa: A002
        """Read a document by its id, 20,000 characters at a time."""
        try:
            stored = self._service.document(id, retriever)
        except RequestError as error:
            raise ToolError(str(error)) from error
        text = stored.text
        part = None if text is None else text[start : start + _PAGE]
        return ReadDocument(id, stored.title or None, part, start, len(text or ""), dict(stored.metadata or {}))

    async def list_fields(self) -> list[RetrieverDescription]:
        """List the retrievers, and the fields that a filter can test with their most frequent values."""

        def describe() -> list[RetrieverDescription]:
            found = []
            for name, retriever in self._service.retrievers.items():
                index = retriever.served.current.index
                found.append(RetrieverDescription(name, retriever.kind, len(index), describe_fields(index)))
            return found

        return await asyncio.get_running_loop().run_in_executor(self._service.threads, describe)


def describe_fields(index: IndexReader) -> list[FieldDescription]:
    """Describe the fields of an index to an agent."""
    found = []
    for field, facet in index.facets(list(index.fields), most=_VALUES).items():
        limits = facet.range if facet.distinct > _VALUES else None
        values = [(value[:_EXCERPT] if isinstance(value, str) else value, count) for value, count in facet.values]
        found.append(FieldDescription(field, [index.fields[field]], [] if limits else values, facet.distinct, limits))
    return found


def run_server(service: Service) -> None:
    """Serve over standard input and output until the client closes them."""
    try:
        create_server(service).run("stdio")
    finally:
        service.threads.shutdown(wait=False, cancel_futures=True)
