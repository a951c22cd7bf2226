"""`quiver mcp` as a process, asked by the client of the official package."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from quiver.retrieval.index import build_index, delete_documents, open_index
from quiver.retrieval.records import Document
from quiver.retrieval.search.bm25 import word_index
from quiver.retrieval.serving.service import open_service
from tests.processes import imported_python
from tests.retrieval.serving.conftest import REPOSITORY, Indexes, documents

mcp = pytest.importorskip("mcp")
jsonschema = pytest.importorskip("jsonschema")  # mcp needs it


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The server over an index of words, asked in this process."""
    from quiver.retrieval.serving.mcp_server import create_server

    folder = build_index(documents(), "bm25", tmp_path_factory.mktemp("agents") / "words").path
    return create_server(open_service({"words": folder}))


def test_a_field_of_many_numbers_is_described_by_its_range() -> None:
    from quiver.retrieval.serving.mcp_server import describe_fields

    documents = [Document(str(number), "words", metadata={"line": 3 * number, "kind": "ab"[number % 2]}) for number in range(25)]
    kind, line = describe_fields(build_index(documents, "bm25"))
    assert (kind.name, kind.values, kind.distinct, kind.range) == ("kind", [("a", 13), ("b", 12)], 2, None)
    assert (line.name, line.values, line.distinct, line.range) == ("line", [], 25, (0, 72))


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        (
            "search",
            {"query": "sea", "filters": ["year<2005"]},
            "unknown argument 'filters' (did you mean 'filter'?); the arguments are query,",
        ),
        (
            "search",
            {"query": "sea", "where": {"year": 2004}},
            "unknown argument 'where' (did you mean 'filter'?); the arguments are query,",
        ),
        ("search", {"query": "sea", "top_k": 1, "by": 2}, "unknown arguments 'top_k' (did you mean 'k'?), 'by'; the arguments are"),
        ("search", {"query": "sea", "k": "5"}, "argument.k: must be a whole number"),
        (
            "search",
            {"query": "sea", "k": 2.0, "offset": True},
            "argument.k: must be a whole number; argument.offset: must be a whole number",
        ),
        ("search", {"query": "sea", "filter": {"year": 2004}}, 'argument.filter: must be text or a list; write it as "year >= 2015"'),
        ("search", {"query": "sea", "filter": ["year = 2004", 5]}, "argument.filter.1: must be text"),
        ("search", {}, "argument.query: Field required"),
        ("search", {"query": "sea", "retriever": "other"}, "Error executing tool search: no such retriever; the retrievers are words"),
        (
            "read_document",
            {"document_id": "d/7"},
            "unknown argument 'document_id' (did you mean 'id'?); the arguments are id, start, retriever",
        ),
        ("list_fields", {"retriever": "dense"}, "unknown argument 'retriever'; there are no arguments"),
    ],
)
def test_unknown_arguments_and_wrong_types_are_refused_in_one_line(server: Any, tool: str, arguments: dict[str, Any], said: str) -> None:
    async def refuse() -> Any:
        async with mcp.Client(server) as client:
            return await client.call_tool(tool, arguments)

    refused = asyncio.run(refuse())
    [content] = refused.content
    assert refused.is_error
    assert content.text.startswith(said)
    assert "\n" not in content.text
    if tool == "search":
        [schema] = [each.output_schema for each in asyncio.run(server.list_tools()) if each.name == tool]
        jsonschema.validate(refused.structured_content, schema)
        assert (refused.structured_content["hits"], refused.structured_content["nothing_found"]) == ([], content.text)


def test_the_schema_of_every_tool_has_no_further_arguments(server: Any) -> None:
    tools = asyncio.run(server.list_tools())
    assert [tool.input_schema["additionalProperties"] for tool in tools] == [False] * 3
    found = asyncio.run(server.call_tool("search", {"query": "sea", "filter": '["year<2005"]', "k": 3, "retriever": None, "offset": None}))
    assert {hit["fields"]["year"] < 2005 for hit in found.structured_content["hits"]} == {True}


@pytest.mark.slow
def test_an_agent_searches_reads_and_lists_fields(indexes: Indexes, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    shutil.copytree(indexes.dense, folder)
    command = mcp.StdioServerParameters(
        command=imported_python(),
        args=["-m", "quiver.cli.main", "mcp", f"dense={folder}", str(indexes.colbert), "--fuse", "bm25", "--no-verify"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        cwd=str(REPOSITORY),
    )
    words = word_index(open_index(folder)).search(["granite snow"], 6, filter="year>=2003")

    async def talk() -> None:
        async with mcp.Client(command) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert set(tools) == {"search", "read_document", "list_fields"}
            assert tools["search"].input_schema["required"] == ["query"]
            assert "year >= 2015" in tools["search"].input_schema["properties"]["filter"]["description"]
            assert all(tool.annotations.read_only_hint for tool in tools.values())

            async def call(tool: str, **arguments: Any) -> Any:
                result = await client.call_tool(tool, arguments)
                assert not result.is_error, result.content
                return result.structured_content

            asked = {"query": "granite snow", "retriever": "bm25", "filter": ["year>=2003"]}
            found = await call("search", **asked, k=3)
            more = await call("search", **asked, k=3, offset=3)
            assert [hit["id"] for hit in found["hits"] + more["hits"]] == list(words.ids[0])
            assert (found["matching"], found["retriever"], found["warning"]) == (42, "bm25", None)
            assert found["hits"][0]["fields"]["year"] >= 2003
            read = await call("read_document", id=found["hits"][0]["id"])
            assert read["text"] == found["hits"][0]["text"]
            assert read["characters"] == len(read["text"])
            assert (await call("read_document", id="d/7", start=4))["text"] == read_text(folder, "d/7")[4:]
            described = (await call("list_fields"))["result"]
            assert [(each["name"], each["kind"], each["documents"]) for each in described] == [
                ("dense+bm25", "fused", 60),
                ("dense", "dense", 60),
                ("colbert", "colbert", 60),
                ("bm25", "bm25", 60),
            ]
            by_text = await call("search", **{**asked, "filter": "year>=2003"}, k=3)
            assert by_text["hits"] == found["hits"]
            (lang,) = [each for each in described[0]["fields"] if each["name"] == "lang"]
            assert (lang["types"], lang["values"], lang["distinct"]) == (["string"], [["de", 30], ["en", 30]], 2)
            # A newer generation of the index is followed while the agent is connected.
            delete_documents(folder, ["d/7"])
            for _ in range(100):
                if (await client.call_tool("read_document", {"id": "d/7"})).is_error:
                    break
                await asyncio.sleep(0.1)
            else:
                pytest.fail("the deleted document is still there")

    asyncio.run(talk())


def read_text(folder: Path, key: str) -> str:
    return open_index(folder).document(key).text
