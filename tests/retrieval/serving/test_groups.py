"""Searches that group passages by a field: the command line, `Index.search`, POST and GET /v1/search and the MCP server agree."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quiver import build_index, open_index
from quiver.encoder.errors import InputError
from quiver.retrieval.index import add_documents, delete_documents
from quiver.retrieval.records import Document
from quiver.retrieval.search.groups import field_of
from quiver.retrieval.serving.application import create_application
from quiver.retrieval.serving.schemas import Limits
from quiver.retrieval.serving.service import Service, open_service
from tests.retrieval.serving.conftest import answer

mcp = pytest.importorskip("mcp")
QUERY = "sea bird"


class Built(NamedTuple):
    folder: Path
    service: Service
    app: Any


def passages() -> list[Document]:
    """Twenty passages of document a rank first; b and c tie, so do the passages of d; the last document has no field."""
    texts = {f"a#{number}": "sea bird " * (40 - number) for number in range(20)}
    texts |= {"b#1": "sea wing stone", "c#1": "sea wing stone", "d#1": "sea wing stone salt", "d#2": "sea wing stone salt"}
    found = [Document(key, text, f"On {key}", {"document": key[0], "year": 2000 + ord(key[0])}) for key, text in texts.items()]
    return [*found, Document("alone", "the sea and the stone and the salt", metadata={"year": 2004})]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    root = tmp_path_factory.mktemp("grouped")
    build_index(passages(), "bm25", root / "index")
    service = open_service({"words": root / "index"})
    return Built(root / "index", service, create_application(service))


class Shown(NamedTuple):
    """What every way of searching says of a hit."""

    id: str
    score: float
    group: str | None
    passages: list[tuple[str, float]]


def shown(hits: Any) -> list[Shown]:
    return [Shown(hit["id"], hit["score"], hit["group"], list(hit["passages"].items())) for hit in hits]


def post(app: Any, **request: Any) -> Any:
    return answer(app, "POST", "/v1/search", json={"query": QUERY, "group_by": "document"} | request)


def call_tool(service: Service, **arguments: Any) -> Any:
    from quiver.retrieval.serving.mcp_server import create_server

    async def call() -> Any:
        async with mcp.Client(create_server(service)) as client:
            return await client.call_tool("search", {"query": QUERY} | arguments)

    return asyncio.run(call())


def message_of(response: Any) -> str:
    assert response.status_code == 422
    said: str = response.json()["error"]["message"]
    return said


@pytest.mark.parametrize(("k", "filter"), [(1, None), (3, None), (9, None), (3, "year>=2098")])
def test_grouped_hits_are_the_same_wherever_they_are_asked_for(
    quiver: Callable[..., Any], built: Built, tmp_path: Path, k: int, filter: str | None
) -> None:
    asked = ("search", built.folder, QUERY, "-k", k, "--group-by", "document", *(("--filter", filter) if filter else ()))
    expected = shown(json.loads(quiver(*asked, "--json").out))
    groups = ["a", "c", "b", "alone", "d"] if filter is None else ["c", "b", "d"]
    assert [hit.group for hit in expected] == groups[:k]
    if k == 9:
        assert [hit.id for hit in expected] == ["a#0", "c#1", "b#1", "alone", "d#2"]
        assert [len(hit.passages) for hit in expected] == [20, 1, 1, 1, 2]
    hits = open_index(built.folder).search(QUERY, k, filter=filter, group_by="document")
    assert [Shown(hit.id, hit.score, hit.group, list(hit.passages.items())) for hit in hits] == expected
    posted = post(built.app, k=k, filter=filter).json()["hits"]
    assert shown(posted) == expected
    assert [hit["text"] for hit in posted] == [hit.text for hit in hits]
    parameters = {"q": QUERY, "k": k, "group_by": "document"} | ({} if filter is None else {"filter": filter})
    assert shown(answer(built.app, "GET", "/v1/search", params=parameters).json()["hits"]) == expected
    called = call_tool(built.service, k=k, group_by="document", **({} if filter is None else {"filter": filter})).structured_content
    assert shown(called["hits"]) == expected
    assert not any(hit["more_passages"] for hit in called["hits"])
    (tmp_path / "queries.tsv").write_text(f"q1\t{QUERY}\n")
    asked = (*asked[:2], "--queries", tmp_path / "queries.tsv", "--out", tmp_path / "run", *asked[3:])
    assert quiver(*asked).code == 0
    assert [line.split()[2] for line in (tmp_path / "run").read_text().splitlines()] == [hit.group for hit in expected]


def test_pages_of_groups_are_parts_of_one_ranking(built: Built) -> None:
    whole = post(built.app, k=10, offset=0).json()["hits"]
    assert [hit["group"] for hit in whole] == ["a", "c", "b", "alone", "d"]
    assert [hit for offset in (0, 2, 4) for hit in post(built.app, k=2, offset=offset).json()["hits"]] == whole
    assert post(built.app, k=2, offset=6).json()["hits"] == []
    assert call_tool(built.service, offset=6, group_by="document").structured_content["nothing_found"] is None
    explained = post(built.app, k=2, offset=1, explain=True).json()["hits"]
    assert [hit["explanation"]["score"] for hit in explained] == pytest.approx([hit["score"] for hit in whole[1:3]])


def test_an_answer_is_partial_if_more_groups_need_too_many_passages(built: Built) -> None:
    service = open_service({"words": built.folder}, limits=Limits(passages=16))
    app = create_application(service)
    for k, filter, groups, partial in ((3, None, ["a"], True), (1, None, ["a"], False), (9, "year>=2098", ["c", "b", "d"], False)):
        found = post(app, k=k, filter=filter).json()
        assert ([hit["group"] for hit in found["hits"]], found["partial"]) == (groups, partial)
    assert call_tool(service, k=3, group_by="document").structured_content["partial"]
    assert not post(built.app, k=9).json()["partial"]


def test_the_search_ends_when_all_values_are_found(quiver: Callable[..., Any], tmp_path: Path) -> None:
    documents = [Document(str(number), f"sea bird {number}", metadata={"kind": "ab"[number % 2]}) for number in range(60)]
    build_index(documents[:50], "bm25", tmp_path / "index")
    add_documents(tmp_path / "index", [*documents[50:], Document("z", "sea bird", metadata={"kind": "c"})], "bm25")
    index = delete_documents(tmp_path / "index", ["z"])
    assert field_of(index, "kind").most == 2
    expected = shown(json.loads(quiver("search", index.path, QUERY, "-k", 10, "--group-by", "kind", "--json").out))
    assert sum(len(hit.passages) for hit in expected) == 8
    hits = open_index(index.path).search(QUERY, 10, group_by="kind")
    assert [Shown(hit.id, hit.score, hit.group, list(hit.passages.items())) for hit in hits] == expected
    app = create_application(open_service({"words": index.path}))
    assert shown(post(app, group_by="kind").json()["hits"]) == expected
    assert shown(post(app, group_by="kind", offset=0).json()["hits"]) == expected


def test_a_field_that_no_document_has_is_refused_in_the_same_words(quiver: Callable[..., Any], built: Built) -> None:
    said = "no document has the field 'page'; the fields are document, year"
    done = quiver("search", built.folder, QUERY, "--group-by", "page")
    assert (done.code, done.err.strip().endswith(said), done.err.count("\n")) == (2, True, 1)
    with pytest.raises(InputError, match=re.escape(said)):
        open_index(built.folder).search(QUERY, group_by="page")
    assert message_of(post(built.app, group_by="page")) == said
    assert message_of(answer(built.app, "GET", "/v1/search", params={"q": QUERY, "group_by": "page"})) == said
    refused = call_tool(built.service, group_by="page")
    assert refused.is_error
    assert refused.content[0].text.endswith(said)
    for wrong in ("", 7, ["document"]):
        assert post(built.app, group_by=wrong).status_code == 422


def test_why_nothing_was_found_is_told_alike_everywhere(quiver: Callable[..., Any], built: Built, caplog: pytest.LogCaptureFixture) -> None:
    for query, conditions in ((QUERY, ["year>=3000"]), (QUERY, ["year>=3000", "document = 'z'"]), ("xylophone", []), ("C++", [])):
        done = quiver("search", built.folder, query, *(part for each in conditions for part in ("--filter", each)))
        found = call_tool(built.service, query=query, filter=conditions).structured_content
        assert (found["hits"], found["nothing_found"]) == ([], done.out.strip())
        answered = post(built.app, query=query, filter=conditions, group_by=None).json()
        assert (answered["hits"], answered["nothing_found"]) == ([], done.out.strip())
        caplog.clear()
        assert not len(open_index(built.folder).search(query, filter=conditions))
        assert [done.out.strip().endswith(said) for said in caplog.messages] == [True]
    said = call_tool(built.service, filter="document = 'z'").structured_content["nothing_found"]
    assert said.startswith("nothing found: none of 25 documents matches the filter; values of document: a (20), d (2), b (1)")
    assert call_tool(built.service).structured_content["nothing_found"] is None
    assert post(built.app).json()["nothing_found"] is None
