"""Fused and re-ranked retrievers of the service against the library's functions, and the ranks of their parts."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver import build_index, open_index
from quiver.encoder.errors import InputError
from quiver.retrieval.index import Filter, add_documents, delete_documents
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import Document, Query
from quiver.retrieval.search.bm25 import word_index
from quiver.retrieval.search.retrievers import RerankedRetriever, open_retriever
from quiver.retrieval.serving.application import create_application
from quiver.retrieval.serving.service import Access, Combinations, Service, open_service
from tests.retrieval.serving.conftest import TOKEN, Indexes, answer, documents, httpx

QUERY = "a bird on the deep sea"
FUSED = "dense+bm25"


@pytest.fixture(scope="module")
def service(indexes: Indexes) -> Service:
    combined = Combinations(fused=[["dense", "bm25"], ["dense", "colbert", "bm25"]], reranked_by="colbert")
    return open_service({"dense": indexes.dense, "colbert": indexes.colbert}, combined=combined)


@pytest.fixture(scope="module")
def app(service: Service) -> Any:
    return create_application(service)


def search(app: Any, **request: Any) -> Any:
    return answer(app, "POST", "/v1/search", json={"query": QUERY, **request}).json()


def test_each_combination_is_a_retriever(app: Any) -> None:
    info = answer(app, "GET", "/v1/info").json()["retrievers"]
    assert [(each["name"], each["kind"], each["parts"]) for each in info] == [
        ("dense+bm25>colbert", "reranked", ["dense", "bm25", "colbert"]),
        ("dense", "dense", []),
        ("colbert", "colbert", []),
        ("bm25", "bm25", []),
        ("dense+bm25", "fused", ["dense", "bm25"]),
        ("dense+colbert+bm25", "fused", ["dense", "colbert", "bm25"]),
        ("dense+colbert+bm25>colbert", "reranked", ["dense", "colbert", "bm25", "colbert"]),
    ]
    assert [each["depth"] for each in info] == [100] + [None] * 5 + [100]
    assert all(each["documents"] == 60 and each["fields"]["year"] == ["integer"] for each in info)
    assert [each["id"] for each in answer(app, "GET", "/v1/models").json()["data"]] == ["dense", "colbert"]
    assert search(app, query="C++", retriever=FUSED)["warning"].startswith("no word of the query counts: BM25 leaves out")


@pytest.mark.parametrize("filter", [None, "year>=2003"])
@pytest.mark.parametrize(
    ("name", "fuse", "rerank"),
    [(FUSED, ["bm25"], False), ("dense+bm25>colbert", ["bm25"], True), ("dense+colbert+bm25", ["colbert", "bm25"], False)],
)
def test_a_combination_ranks_as_the_librarys(
    app: Any, indexes: Indexes, name: str, fuse: list[str], rerank: bool, filter: str | None
) -> None:
    folders = [indexes.colbert if each == "colbert" else each for each in fuse]
    library = open_retriever(indexes.dense, fuse=folders, rerank=indexes.colbert if rerank else None)
    expected = library.search([Query("q", QUERY)], 12, filter=None if filter is None else Filter.parse(filter)).ranking(0)
    found = search(app, k=12, retriever=name, filter=filter)
    assert [hit["id"] for hit in found["hits"]] == list(expected)
    assert [hit["score"] for hit in found["hits"]] == pytest.approx(list(expected.values()), abs=1e-5)
    assert all(hit["text"] and hit["metadata"] for hit in found["hits"])
    by_address = answer(app, "GET", f"/v1/search?q={QUERY.replace(' ', '+')}&retriever={name}")  # whose + is a space
    assert by_address.json()["retriever"] == name


@pytest.mark.parametrize(
    ("filter", "matches"),
    [
        (
            "year >= 2003 AND (lang = 'en' OR year IN (2004, 2006))",
            lambda year, lang, even: year >= 2003 and (not even or year in (2004, 2006)),
        ),
        ("NOT even AND year BETWEEN 2001 AND 2005", lambda year, lang, even: not even and 2001 <= year <= 2005),
        ("lang LIKE 'd%' AND id != 'd/4' AND year IS NOT NULL", lambda year, lang, even: lang == "de"),
    ],
)
@pytest.mark.parametrize("name", ["dense", "colbert", "bm25", FUSED])
def test_a_filter_finds_the_same_in_python_command_line_and_service(
    app: Any, indexes: Indexes, quiver: Any, name: str, filter: str, matches: Callable[..., bool]
) -> None:
    wanted = {each.id for each in documents() if matches(**(each.metadata or {}))} - ({"d/4"} if "d/4" in filter else set())
    folder = indexes.colbert if name == "colbert" else indexes.dense
    fused: dict[str, Any] = {"bm25": {"fuse": "bm25", "weights": (0, 1)}, FUSED: {"fuse": "bm25"}}.get(name, {})
    options = [*(["--fuse", "bm25"] if fused else []), *(["--weights", "0,1"] if "weights" in fused else [])]
    served = [hit["id"] for hit in search(app, k=60, retriever=name, filter=filter)["hits"]]
    printed = json.loads(quiver("search", folder, QUERY, "-k", 60, *options, "--filter", filter, "--json").out)
    assert [hit.id for hit in open_index(folder).search(QUERY, 60, filter=filter, **fused)] == [hit["id"] for hit in printed] == served
    assert set(served) <= wanted if name == "bm25" else set(served) == wanted
    assert served


def test_pages_of_a_re_ranking_end_with_its_candidates(app: Any, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a page far down re-ranks 100 candidates, not the 1,000 of the largest k."""
    depths: list[int] = []
    searched = RerankedRetriever.search
    monkeypatch.setattr(
        RerankedRetriever, "search", lambda self, queries, k, **rest: depths.append(k) or searched(self, queries, k, **rest)
    )
    name = "dense+bm25>colbert"
    assert len(search(app, k=10, offset=90, retriever=name)["hits"]) == 0  # there are 60 documents
    assert len(search(app, k=10, offset=45, retriever=name)["hits"]) == 10
    assert depths == [100, 100]
    for asked in ({"k": 10, "offset": 91}, {"k": 101}):
        refused = search(app, retriever=name, **asked)["error"]
        assert (refused["code"], refused["message"]) == ("beyond_limit", f"offset + k: {name} re-ranks 100 candidates, got 101")
    assert len(search(app, k=10, offset=91, retriever="dense+bm25")["hits"]) == 0


def test_an_explanation_has_the_ranks_in_the_parts(app: Any) -> None:
    dense = [hit["id"] for hit in search(app, k=50, retriever="dense")["hits"]]
    words = {hit["id"]: (rank, hit["score"]) for rank, hit in enumerate(search(app, k=50, retriever="bm25")["hits"], start=1)}
    for hit in search(app, k=15, retriever=FUSED, explain=True)["hits"]:
        why = hit["explanation"]
        assert (why["kind"], why["score"]) == ("ranks", hit["score"])
        by_vectors, by_words = why["parts"]
        assert (by_vectors["name"], by_words["name"]) == ("dense", "bm25")
        assert by_vectors["rank"] == dense.index(hit["id"]) + 1
        assert (by_words["rank"], by_words["score"]) == words.get(hit["id"], (None, None))
        ranks = [each["rank"] for each in why["parts"] if each["rank"] is not None]
        assert math.fsum(1 / (60 + rank) for rank in ranks) == pytest.approx(hit["score"], rel=1e-5)
    assert any(hit["id"] not in words for hit in search(app, k=50, retriever=FUSED)["hits"])
    fused = [hit["id"] for hit in search(app, k=50, retriever=FUSED)["hits"]]
    for hit in search(app, k=5, retriever="dense+bm25>colbert", explain=True)["hits"]:
        why = hit["explanation"]
        assert why["kind"] == "tokens"
        assert math.fsum(match["score"] for match in why["matches"]) == pytest.approx(hit["score"], rel=1e-4)
        assert [each["name"] for each in why["parts"]] == ["dense", "bm25", "candidates"]
        assert why["parts"][2]["rank"] == fused.index(hit["id"]) + 1


def test_concurrent_requests_with_different_filters_are_encoded_together(service: Service, app: Any) -> None:
    model = service.retrievers["dense"].model
    assert model is not None
    calls: list[int] = []
    encode = model.encode_texts

    def counted(texts: Any, role: Any, **options: Any) -> Any:
        calls.append(len(texts))
        return encode(texts, role, **options)

    bodies = [{"query": f"{QUERY} {number}", "filter": f"year>={2000 + number % 5}", "retriever": FUSED, "k": 5} for number in range(16)]
    alone = [answer(app, "POST", "/v1/search", json=body).json()["hits"] for body in bodies]

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
            return [each.json()["hits"] for each in await asyncio.gather(*(client.post("/v1/search", json=body) for body in bodies))]

    model.encode_texts = counted  # type: ignore[method-assign]
    try:
        together = asyncio.run(ask())
    finally:
        del model.encode_texts
    assert [[hit["id"] for hit in hits] for hits in together] == [[hit["id"] for hit in hits] for hits in alone]
    assert sum(calls) == 16
    assert len(calls) < 16


def test_an_index_is_reranked_by_a_model_that_encodes_texts(indexes: Indexes) -> None:
    source = open_index(indexes.colbert).manifest.model.source
    app = create_application(open_service({"dense": indexes.dense}, combined=Combinations(reranked_by=source)))
    expected = open_retriever(indexes.dense, rerank=source).search([Query("q", QUERY)], 8).ranking(0)
    found = search(app, k=8, retriever="dense>colbert-model", explain=True)["hits"]
    assert [hit["id"] for hit in found] == list(expected)
    assert [hit["explanation"]["kind"] for hit in found] == ["tokens"] * 8


def test_a_document_of_one_index_is_found_and_not_reranked(indexes: Indexes, tmp_path: Path) -> None:
    shutil.copytree(indexes.dense, tmp_path / "dense")
    add_documents(tmp_path / "dense", [Document("only", QUERY)], load_model(open_index(indexes.dense).manifest.model.source))
    delete_documents(tmp_path / "dense", ["d/7"])
    folders = {"colbert": indexes.colbert, "dense": tmp_path / "dense"}
    combined = Combinations(fused=[["dense", "colbert"]], reranked_by="colbert")
    app = create_application(open_service(folders, combined=combined))
    fused = search(app, k=61, retriever="dense+colbert")
    assert next(hit for hit in fused["hits"] if hit["id"] == "only")["text"] == QUERY
    assert next(hit for hit in fused["hits"] if hit["id"] == "d/7")["text"]
    assert fused["warning"].startswith("'dense+colbert' combines indexes of different documents")
    reranked = search(app, k=61, retriever="dense+colbert>colbert")
    assert len(reranked["hits"]) == 60
    assert "only" not in [hit["id"] for hit in reranked["hits"]]


def test_changes_name_one_index(indexes: Indexes, tmp_path: Path) -> None:
    shutil.copytree(indexes.dense, tmp_path / "dense")
    folders = {"dense": tmp_path / "dense", "colbert": indexes.colbert}
    combined = Combinations(fused=[["dense", "bm25"], ["dense", "colbert"]])
    app = create_application(open_service(folders, combined=combined, access=Access(TOKEN)))
    body = {"documents": [{"id": "new", "text": "obsidian"}], "retriever": "dense+colbert"}
    refused = answer(app, "POST", "/v1/documents", json=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert refused.status_code == 422
    assert "ranks by several indexes; name the one to change: dense, colbert" in refused.json()["error"]["message"]
    body["retriever"] = FUSED
    assert answer(app, "POST", "/v1/documents", json=body, headers={"Authorization": f"Bearer {TOKEN}"}).json()["documents"] == 61
    assert answer(app, "POST", "/v1/search", json={"query": "obsidian", "retriever": FUSED}).json()["hits"][0]["id"] == "new"


@pytest.mark.parametrize(
    ("combined", "said"),
    [
        (Combinations(fused=[["dense", "none"]]), "--fuse dense+none: there is no ranking 'none'; there are dense, colbert"),
        (Combinations(fused=[["dense", "dense"]]), "--fuse dense+dense: a ranking occurs twice"),
        (Combinations(reranked_by="dense"), "--rerank dense: only an index of a ColBERT model re-ranks"),
    ],
)
def test_mistakes_are_named(indexes: Indexes, combined: Combinations, said: str) -> None:
    with pytest.raises(InputError) as raised:
        open_service({"dense": indexes.dense, "colbert": indexes.colbert}, combined=combined)
    assert said in str(raised.value)


def test_an_index_of_bm25_is_served_and_fused_without_a_model(indexes: Indexes, tmp_path: Path) -> None:
    build_index(documents(), "bm25", tmp_path / "words")
    app = create_application(open_service({"words": tmp_path / "words"}, access=Access(TOKEN)))
    expected = word_index(open_index(indexes.dense)).search([QUERY], 8, filter="year>=2003")
    found = search(app, k=8, filter="year>=2003", explain=True, facets=["lang"])
    assert [hit["id"] for hit in found["hits"]] == list(expected.ids[0])
    for hit in found["hits"]:
        assert hit["explanation"]["kind"] == "words"
        assert math.fsum(word["score"] for word in hit["explanation"]["words"]) == pytest.approx(hit["score"], rel=1e-5)
    assert found["facets"]["lang"]["distinct"] == 2
    (info,) = answer(app, "GET", "/v1/info").json()["retrievers"]
    assert (info["kind"], info["efforts"], info["explains"]) == ("bm25", [], True)
    assert answer(app, "GET", "/v1/models").json()["data"] == []
    assert (
        answer(app, "POST", "/embed", json={"inputs": "bird"}).json()["error"]["message"].endswith("this service has none that can do this")
    )
    body = {"documents": [{"id": "new", "text": "obsidian"}]}
    assert answer(app, "POST", "/v1/documents", json=body, headers={"Authorization": f"Bearer {TOKEN}"}).json()["documents"] == 61
    assert answer(app, "POST", "/v1/search", json={"query": "obsidian"}).json()["hits"][0]["id"] == "new"
    with pytest.raises(InputError, match="words: an index of BM25, which bm25 would fuse with itself; leave out bm25"):
        open_service({"words": tmp_path / "words"}, combined=Combinations(fused=[["words", "bm25"]]))
    folders = {"words": tmp_path / "words", "colbert": indexes.colbert}
    fused = create_application(open_service(folders, combined=Combinations(fused=[["words", "colbert"]], reranked_by="colbert")))
    library = open_retriever(tmp_path / "words", fuse=[indexes.colbert], rerank=indexes.colbert).search([Query("q", QUERY)], 9).ranking(0)
    assert [hit["id"] for hit in search(fused, k=9, retriever="words+colbert>colbert")["hits"]] == list(library)


def test_each_index_is_fused_with_bm25_of_its_own_texts(indexes: Indexes, tmp_path: Path) -> None:
    other = build_index([Document(f"other-{number}", f"a bird number {number}") for number in range(5)], "bm25", tmp_path / "other")
    folders = {"other": other.path, "dense": indexes.dense}
    service = open_service(folders, combined=Combinations(fused=[["dense", "bm25"]]))
    assert list(service.retrievers) == ["dense+bm25", "other", "dense", "bm25"]
    app = create_application(service)
    expected = open_retriever(indexes.dense, fuse=["bm25"]).search([Query("q", QUERY)], 8).ranking(0)
    assert [hit["id"] for hit in search(app, k=8, retriever="dense+bm25")["hits"]] == list(expected)
    assert {hit["id"] for hit in search(app, k=50, retriever="bm25")["hits"]} <= {document.id for document in documents()}
    two = {"colbert": indexes.colbert, "dense": indexes.dense}
    service = open_service(two, combined=Combinations(words=True, fused=[["dense", "bm25"], ["bm25", "colbert"]]))
    served = {name: [part.served for part in retriever.parts] for name, retriever in service.retrievers.items()}
    assert served["bm25"] == served["colbert"]
    assert served["dense+bm25"] == served["dense"] * 2
    assert served["bm25+colbert"] == served["colbert"] * 2
