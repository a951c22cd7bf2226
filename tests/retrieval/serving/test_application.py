"""The routes of the service: answers and refusals."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import resource
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import Filter, add_documents, build_index, open_index
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import Document, Query
from quiver.retrieval.search.retrievers import IndexSearcher
from quiver.retrieval.serving.application import create_application
from quiver.retrieval.serving.schemas import Limits, json_body
from quiver.retrieval.serving.service import Access, Combinations, Service, open_service
from tests.retrieval.serving.conftest import TOKEN, Indexes, answer, documents


@pytest.fixture(scope="module")
def service(indexes: Indexes) -> Service:
    folders = {"dense": indexes.dense, "colbert": indexes.colbert, "silent": indexes.silent}
    return open_service(
        folders,
        combined=Combinations(words=True),
        limits=Limits(k=50, explained=5, batch=4, hits=100, query_characters=200, filter_characters=1800, body_bytes=2000),
    )


@pytest.fixture(scope="module")
def app(service: Service) -> Any:
    return create_application(service)


def search(app: Any, **request: Any) -> Any:
    return answer(app, "POST", "/v1/search", json=request)


def refused(response: Any) -> tuple[int, str]:
    """Return status and code of an error response, and check its form."""
    content = response.json()
    assert set(content) == {"error"}
    assert set(content["error"]) == {"code", "message"}
    assert content["error"]["message"]
    assert "\n" not in content["error"]["message"]
    assert "Traceback" not in response.text
    return response.status_code, content["error"]["code"]


def test_a_search_finds_what_the_index_finds(app: Any, indexes: Indexes) -> None:
    for name, folder in (("dense", indexes.dense), ("colbert", indexes.colbert)):
        index = open_index(folder)
        filter = Filter.parse(["year>=2003", "lang = 'en'"])
        model = load_model(index.manifest.model.source)
        run = IndexSearcher(index, model).search([Query("q", "a bird on the sea")], 7, filter=filter).ranking(0)
        found = search(app, query="a bird on the sea", k=7, retriever=name, filter=["year>=2003", "lang = 'en'"]).json()
        assert [hit["id"] for hit in found["hits"]] == list(run)
        assert [hit["score"] for hit in found["hits"]] == pytest.approx(list(run.values()), abs=1e-6)
        assert found["retriever"] == name
        assert found["generation"] == index.manifest.generation
        assert found["partial"] is False
        assert all(hit["metadata"]["year"] >= 2003 and hit["metadata"]["lang"] == "en" for hit in found["hits"])
        assert found["hits"][0]["text"] == index.document(next(iter(run))).text
        assert 0 <= found["milliseconds"]["encode"] <= found["milliseconds"]["total"]


def test_facets_count_the_documents_that_match_the_filter(app: Any) -> None:
    chosen = [each.metadata or {} for each in documents() if (each.metadata or {})["year"] >= 2007]
    found = search(app, query="granite", k=1, filter="year>=2007", facets=["lang", "year", "even"]).json()
    assert found["matching"] == len(chosen) == 18
    for field in ("lang", "year", "even"):
        counts = Counter(each[field] for each in chosen)
        assert {each["value"]: each["count"] for each in found["facets"][field]["values"]} == counts
        assert found["facets"][field]["distinct"] == len(counts)
    assert search(app, query="granite").json()["facets"] is None
    assert search(app, query="granite").json()["matching"] == 60
    assert refused(search(app, query="granite", facets=["year", "year"])) == (422, "invalid_request")
    unknown = search(app, query="granite", facets=["colour"])
    assert refused(unknown) == (422, "invalid_request")
    assert unknown.json()["error"]["message"].startswith("no document has the field 'colour' to count; there are even, lang, year")


@pytest.mark.parametrize("retriever", ["dense", "colbert", "bm25"])
def test_pages_are_parts_of_one_ranking(app: Any, retriever: str) -> None:
    whole = search(app, query="a bird on the sea", k=50, retriever=retriever).json()["hits"]
    paged = []
    for offset in range(0, 50, 7):
        page = search(app, query="a bird on the sea", k=min(7, 50 - offset), offset=offset, retriever=retriever).json()
        assert page["offset"] == offset
        paged += page["hits"]
    assert [hit["id"] for hit in paged] == [hit["id"] for hit in whole]
    assert search(app, query="granite", k=10, offset=40, retriever=retriever).status_code == 200
    assert refused(search(app, query="granite", k=10, offset=41, retriever=retriever)) == (422, "beyond_limit")
    batch = answer(app, "POST", "/v1/search/batch", json={"queries": ["sea", "bird"], "k": 3, "offset": 3, "retriever": retriever}).json()
    for query, found in zip(("sea", "bird"), batch["results"], strict=True):
        expected = search(app, query=query, k=6, retriever=retriever).json()["hits"][3:]
        assert [hit["id"] for hit in found["hits"]] == [hit["id"] for hit in expected]


def test_a_search_by_address_answers_as_one_by_post(app: Any) -> None:
    parameters = {"q": "bird", "k": 4, "offset": 2, "filter": ["year>=2003", "lang = 'en'"], "facet": ["year"], "explain": True}
    by_address = answer(app, "GET", "/v1/search", params=parameters | {"retriever": "colbert"}).json()
    posted = {"query": "bird", "k": 4, "offset": 2, "filter": ["year>=2003", "lang = 'en'"], "facets": ["year"], "explain": True}
    by_post = search(app, **posted, retriever="colbert").json()
    del by_address["milliseconds"], by_post["milliseconds"]
    assert by_address == by_post
    for query in ("", "?q=", "?q=a&k=0", "?q=a&k=x", "?q=a&effort=none", "?q=a&target_recall=2"):
        assert refused(answer(app, "GET", f"/v1/search{query}")) == (422, "invalid_request")
    assert refused(answer(app, "GET", "/v1/search?q=a&k=51")) == (422, "beyond_limit")
    unknown = answer(app, "GET", "/v1/search?q=a&top=3")
    assert refused(unknown) == (422, "invalid_request")
    assert "unknown parameter 'top' (did you mean 'k'?); the parameters are q, k, offset, retriever, filter, effort" in unknown.text


def test_unknown_fields_of_parts_of_a_body_are_named_by_their_place(indexes: Indexes, tmp_path: Path) -> None:
    app = create_application(open_service({"dense": indexes.dense}, access=Access(TOKEN)))
    body = {"documents": [{"id": "a", "text": "b", "txt": "c"}]}
    response = answer(app, "POST", "/v1/documents", json=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert refused(response) == (422, "invalid_request")
    message = response.json()["error"]["message"]
    assert message == "unknown field 'documents.0.txt' (did you mean 'text'?); the fields are id, text, title, metadata"
    for path, body, said in (
        ("/v1/search", {"query": "a", "top_k": 1, "by": 2}, "unknown fields 'top_k' (did you mean 'k'?), 'by'; the fields are query, k,"),
        ("/v1/search", {"query": "a", "filter": {"year": 2015}}, 'body.filter: must be text or a list; write it as "year >= 2015"'),
        ("/v1/search", {"query": "a", "k": "10", "facets": "year"}, "body.k: must be a whole number; body.facets: must be a list"),
        ("/rerank", {"query": "a", "texts": ["b"], "raw": 1}, "unknown field 'raw'; the fields are query, texts, raw_scores"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_k": 1}, "unknown field 'top_k' (did you mean 'top_n'?); the fields are query,"),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "topn": 1}, "unknown field 'topn' (did you mean 'top_n'?)"),
        ("/", {"inputs": ["b"], "normalise": True}, "unknown field 'normalise' (did you mean 'normalize'?)"),
        ("/", {"inputs": {"sentences": ["b"]}}, "body.inputs: must be text or a list"),
        ("/", {"query": "a", "texts": "b"}, "body.texts: must be a list"),
        ("/rerank", {"documents": ["b"]}, "body.query: Field required"),
    ):
        response = answer(app, "POST", path, json=body)
        assert refused(response) == (422, "invalid_request")
        assert response.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("method", "address", "said"),
    [
        ("GET", "/v1/search?q=bird&filters=year<2005", "unknown parameter 'filters' (did you mean 'filter'?); the parameters are q, k,"),
        ("GET", "/v1/search?query=bird", "unknown parameter 'query' (did you mean 'q'?)"),
        ("POST", "/v1/search?filter=year<2005", "unknown parameter 'filter'; there are no parameters in the address; write fields of"),
        ("GET", "/v1/documents/d/7?index=dense", "unknown parameter 'index' (did you mean 'retriever'?)"),
        ("GET", "/v1/models?kind=dense", "unknown parameter 'kind'; there are no parameters"),
        ("GET", "/v1/info?retriever=dense", "unknown parameter 'retriever'; there are no parameters in the address\n"),
        ("POST", "/embed?normalize=false", "unknown parameter 'normalize'; there are no parameters"),
    ],
)
def test_an_unknown_parameter_of_an_address_is_refused(app: Any, method: str, address: str, said: str) -> None:
    body = {} if method == "GET" else {"json": {"inputs": "bird"} if address.startswith("/embed") else {"query": "bird"}}
    response = answer(app, method, address, **body)
    assert refused(response) == (422, "invalid_request")
    assert f"{response.json()['error']['message']}\n".startswith(said)
    assert answer(app, "GET", "/healthz?from=a-load-balancer").status_code == 200


@pytest.mark.parametrize(
    ("headers", "said"), [({}, "there is none"), ({"content-type": "application/x-www-form-urlencoded"}, "it says application/x-www-form")]
)
@pytest.mark.parametrize("path", ["/v1/search", "/v1/search/batch", "/v1/embeddings", "/rerank"])
def test_a_body_that_is_not_declared_as_json_is_told_so(app: Any, path: str, headers: dict[str, str], said: str) -> None:
    response = answer(app, "POST", path, content=b'{"query": "bird"}', headers=headers)
    assert refused(response) == (415, "not_declared_as_json")
    message = response.json()["error"]["message"]
    assert message.startswith("a JSON body needs the header Content-Type: application/json, but ")
    assert said in message


def test_reading_needs_a_token_if_there_is_one(indexes: Indexes) -> None:
    reading = "another token of enough characters"
    app = create_application(open_service({"dense": indexes.dense}, access=Access(TOKEN, reading)))
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/info", {}),
        ("GET", "/v1/search?q=bird", {}),
        ("POST", "/v1/search", {"json": {"query": "bird"}}),
        ("POST", "/v1/search/batch", {"json": {"queries": ["bird"]}}),
        ("GET", "/v1/documents/d/7", {}),
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models/dense", {}),
        ("POST", "/v1/embeddings", {"json": {"model": "dense", "input": "bird"}}),
        ("POST", "/v1/rerank", {"json": {"query": "bird", "documents": ["a"]}}),
        ("POST", "/v2/rerank", {"json": {"query": "bird", "documents": ["a"]}}),
        ("POST", "/rerank", {"json": {"query": "bird", "texts": ["a"]}}),
        ("POST", "/embed", {"json": {"inputs": "bird"}}),
        ("POST", "/", {"json": {"inputs": "bird"}}),
        ("GET", "/metrics", {}),
    ]
    for method, path, options in calls:
        for token in (None, "wrong"):
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            refusal = answer(app, method, path, headers=headers, **options)
            assert refused(refusal) == (401, "unauthorized"), path
            assert refusal.headers["www-authenticate"] == "Bearer"
        for token in (reading, TOKEN):
            assert answer(app, method, path, headers={"Authorization": f"Bearer {token}"}, **options).status_code == 200, path
    for path in ("/", "/docs", "/openapi.json", "/healthz", "/readyz"):
        assert answer(app, "GET", path).status_code == 200
    body = {"documents": [{"id": "new", "text": "snow"}]}
    assert refused(answer(app, "POST", "/v1/documents", json=body, headers={"Authorization": f"Bearer {reading}"})) == (401, "unauthorized")
    described = {
        path
        for path, operations in answer(app, "GET", "/openapi.json").json()["paths"].items()
        if "security" in next(iter(operations.values()))
    }
    assert described == {
        path.partition("?")[0].replace("d/7", "{key}").replace("models/dense", "models/{name}") for _, path, _ in calls
    } | {"/v1/documents"}


def test_the_page_of_the_api_loads_nothing_from_another_host(app: Any) -> None:
    page = answer(app, "GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert loaded
    for path in loaded:
        assert path.startswith("/"), path
        assert answer(app, "GET", path).status_code == 200, path
    assert "https://" not in page.text
    assert "connect-src 'self'" in answer(app, "GET", "/").headers["content-security-policy"]  # of the search page


def test_answers_and_errors_are_readable_utf8(app: Any) -> None:
    assert "바다" in answer(app, "GET", "/v1/documents/바다").content.decode("utf-8")
    assert json_body({"text": "바다 \ud800"}) == '{"text": "바다 \\ud800"}'.encode()


MALFORMED = [
    (b"{", 400, "malformed_json"),
    (b"", 422, "invalid_request"),
    (b"[" * 1500, 400, None),
    (b'{"query": ' + b"[" * 900 + b"]" * 900 + b"}", 422, "invalid_request"),
    (b'{"query": "a", "k": 1' + b"0" * 1900 + b"}", 422, None),
    (b"null", 422, "invalid_request"),
    (b'{"query": 5}', 422, "invalid_request"),
    (b'{"query": " "}', 422, "invalid_request"),
    (b'{"query": "\\ud800"}', 422, "invalid_request"),
    (b'{"query": "a", "k": 0}', 422, "invalid_request"),
    (b'{"query": "a", "k": true}', 422, "invalid_request"),
    (b'{"query": "a", "k": NaN}', 422, "invalid_request"),
    (b'{"query": "a", "k": 51}', 422, "beyond_limit"),
    (b'{"query": "a", "k": 6, "explain": true}', 422, "beyond_limit"),
    (b'{"query": "' + b"a" * 201 + b'"}', 422, "beyond_limit"),
    (b'{"query": "a", "filter": "year >"}', 422, "bad_filter"),
    (b'{"query": "a", "filter": "colour = 1"}', 422, "invalid_request"),
    (b'{"query": "a", "filter": "year=' + b"1" * 1901 + b'"}', 422, "beyond_limit"),
    (b'{"query": "a", "filter": ["year=1"' + b', "year=1"' * 8 + b"]}", 422, "beyond_limit"),
    (b'{"query": "a", "target_recall": 2}', 422, "invalid_request"),
    (b'{"query": "a", "target_recall": Infinity}', 422, "invalid_request"),
    (b'{"query": "a", "target_recall": 0.9, "effort": "fast"}', 422, "invalid_request"),
    (b'{"query": "a", "retriever": "none"}', 404, "unknown_retriever"),
    (b'{"query": "a", "explain": true, "k": 2, "surprise": 1}', 422, "invalid_request"),
    (b'{"query": "' + b"a" * 2000 + b'"}', 413, "too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), MALFORMED, ids=[str(body[:40]) for body, _, _ in MALFORMED])
def test_invalid_requests_are_refused(app: Any, body: bytes, status: int, code: str | None) -> None:
    found = refused(answer(app, "POST", "/v1/search", content=body, headers={"content-type": "application/json"}))
    assert found[0] == status
    assert code is None or found[1] == code


def test_a_batch_beyond_the_limits_is_refused(app: Any) -> None:
    many = answer(app, "POST", "/v1/search/batch", json={"queries": ["a"] * 5})
    assert refused(many) == (422, "beyond_limit")
    assert "at most 4" in many.json()["error"]["message"]
    assert refused(answer(app, "POST", "/v1/search/batch", json={"queries": ["a"] * 3, "k": 40})) == (422, "beyond_limit")
    assert refused(answer(app, "POST", "/v1/search/batch", json={"queries": []})) == (422, "invalid_request")


def test_no_message_contains_the_path_of_an_index(app: Any, indexes: Indexes) -> None:
    said = search(app, query="a", filter="colour = 'red'").text + answer(app, "GET", "/v1/info").text
    assert str(indexes.dense.parent.parent) not in said


def test_unknown_paths_are_refused(app: Any) -> None:
    assert refused(answer(app, "GET", "/none")) == (404, "not_found")
    assert refused(answer(app, "GET", "/v1/search/batch")) == (405, "method_not_allowed")
    assert answer(app, "GET", "/v1/search/batch").headers["allow"] == "POST"


def test_health_readiness_and_metrics_are_served(indexes: Indexes) -> None:
    service = open_service({"dense": indexes.dense})
    app = create_application(service)
    assert answer(app, "GET", "/healthz").json() == {"status": "ok"}
    assert answer(app, "GET", "/readyz").status_code == 200
    search(app, query="bird")
    answer(app, "NONSENSE", "/v1/info")
    text = answer(app, "GET", "/metrics").text
    for line in (
        'quiver_requests_total{method="POST",route="/v1/search",status="200"} 1.0',
        'quiver_requests_total{method="other",route="/v1/info",status="405"} 1.0',
        'quiver_batch_queries_count{retriever="dense"} 1.0',
        'quiver_stage_seconds_count{retriever="dense",stage="encode"} 1.0',
        'quiver_generation{retriever="dense"} 1.0',
        'quiver_documents{retriever="dense"} 60.0',
        'quiver_queue_queries{retriever="dense"} 0.0',
    ):
        assert line in text
    service.draining = True
    assert refused(answer(app, "GET", "/readyz")) == (503, "draining")
    assert answer(app, "GET", "/healthz").headers["connection"] == "close"


def test_other_origins_are_refused_unless_they_are_named(app: Any, service: Service) -> None:
    headers = {"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in answer(app, "GET", "/v1/info", headers=headers).headers
    named = create_application(service, origins=["https://elsewhere.example"])
    allowed = answer(named, "OPTIONS", "/v1/search", headers=headers)
    assert allowed.headers["access-control-allow-origin"] == "https://elsewhere.example"
    other = answer(named, "GET", "/v1/info", headers={"Origin": "https://another.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("kept", [range(0), range(40)])
def test_rankings_of_different_documents_carry_a_warning(
    indexes: Indexes, tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: range
) -> None:
    model = load_model(open_index(indexes.dense).manifest.model.source)
    others = [Document(f"other/{number}", "granite") for number in range(10)]
    build_index([*(each for number, each in enumerate(documents()) if number in kept), *others], model, tmp_path / "other")
    folders = {"dense": indexes.dense, "colbert": indexes.colbert, "other": tmp_path / "other"}
    app = create_application(open_service(folders, combined=Combinations(words=True)))
    expected = {0: "0 documents are in both, 60 in one and 10 in the other", 40: "40 documents are in both, 60 in one and 50 in the other"}
    assert expected[len(kept)] in caplog.text
    assert caplog.text.endswith("% in common)\n")
    warnings = {each["name"]: each["warning"] for each in answer(app, "GET", "/v1/info").json()["retrievers"]}
    warning = warnings.pop("other")
    assert warning.startswith(f"'dense' and 'other' rank different documents, so their rankings cannot be compared: {expected[len(kept)]}")
    assert warnings == dict.fromkeys(("dense", "colbert", "bm25"))
    # One ranking of one index is compared with nothing.
    assert search(app, query="granite", retriever="other").json()["warning"] is None


def test_an_internal_error_reveals_no_details(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    service = open_service({"dense": indexes.dense})

    def fail(texts: object, role: object) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(service.indexes[0].current.model, "encode_texts", fail)
    failed = search(create_application(service), query="bird")
    assert refused(failed) == (500, "internal")
    assert "inside" not in failed.text


AUTHORISED = {"Authorization": f"Bearer {TOKEN}"}


def test_changes_require_the_token(indexes: Indexes, app: Any) -> None:
    body = {"documents": [{"id": "new", "text": "snow"}]}
    assert refused(answer(app, "POST", "/v1/documents", json=body, headers=AUTHORISED)) == (403, "read_only")
    writable = create_application(open_service({"dense": indexes.dense}, access=Access(TOKEN)))
    for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer \xe9"}):
        sent = {name: value.encode("latin-1") for name, value in headers.items()}
        for method in ("POST", "DELETE"):
            refusal = answer(writable, method, "/v1/documents", json=body, headers=sent)
            assert refused(refusal) == (401, "unauthorized")
            assert refusal.headers["www-authenticate"] == "Bearer"
    assert len(open_index(indexes.dense)) == 60


def test_documents_are_added_and_deleted(indexes: Indexes, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    shutil.copytree(indexes.dense, folder)
    app = create_application(
        open_service({"dense": folder}, combined=Combinations(words=True), access=Access(TOKEN), limits=Limits(documents=3))
    )

    def change(method: str, **body: Any) -> Any:
        return answer(app, method, "/v1/documents", json=body, headers=AUTHORISED)

    new = {"id": "new", "text": "obsidian", "title": "Glass", "metadata": {"year": 2026, "tags": ["a", "b"], "hot": True}}
    added = change("POST", documents=[new])
    assert added.json() == {"retriever": "dense", "generation": 2, "documents": 61}
    hit = search(app, query="obsidian", k=1, retriever="bm25", filter="array_contains(tags, 'a')").json()["hits"][0]
    assert (hit["id"], hit["title"], hit["metadata"]) == ("new", "Glass", new["metadata"])
    assert refused(change("POST", documents=[new])) == (409, "exists")
    assert change("POST", documents=[{**new, "text": "basalt"}], replace=True).json()["documents"] == 61
    assert search(app, query="obsidian", retriever="bm25").json()["hits"] == []
    assert refused(change("POST", documents=[new, new])) == (422, "invalid_request")
    assert refused(change("POST", documents=[{"id": str(number), "text": ""} for number in range(4)])) == (422, "beyond_limit")
    assert refused(change("DELETE", ids=["new", "none"])) == (404, "unknown_document")
    deleted = change("DELETE", ids=["new"]).json()
    assert deleted["documents"] == 60 == len(open_index(folder))
    assert search(app, query="basalt", retriever="bm25").json()["hits"] == []
    assert search(app, query="granite").json()["generation"] == deleted["generation"]


def test_metadata_of_a_request_are_those_of_a_file(indexes: Indexes, tmp_path: Path) -> None:
    """A null is no field, and fields of objects are named as in files."""
    rows = [
        {"id": "a", "text": "obsidian", "year": 2020, "isbn": None, "venue": {"name": "ACL", "page": {"first": 7, "last": None}}},
        {"id": "b", "text": "obsidian", "authors": [{"name": "Bo"}, {"name": "Jo"}, {"age": 3}], "tags": ["x", None, 2.5], "note": {}},
        {"id": "c", "text": "obsidian", "title": None},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = []
    for name in ("by file", "by http"):
        folder = tmp_path / name
        shutil.copytree(indexes.dense, folder)
        if name == "by file":
            add_documents(folder, tmp_path / "rows.jsonl", load_model(open_index(folder).manifest.model.source))
        else:
            app = create_application(open_service({"dense": folder}, access=Access(TOKEN)))
            own = ("id", "text", "title")
            documents = [
                {key: row[key] for key in own if key in row} | {"metadata": {key: row[key] for key in row if key not in own}}
                for row in rows
            ]
            assert answer(app, "POST", "/v1/documents", json={"documents": documents}, headers=AUTHORISED).status_code == 200
        index = open_index(folder)
        found.append(([index.document(each["id"]) for each in rows], index.fields, index.count("venue.page.first=7")))
    assert found[0] == found[1]
    assert found[1][2] == 1


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"a": {"b": 1}, "a.b": 2}, "two metadata fields have the name 'a.b'"),
        ({"a": ["\ud800"]}, "unpaired surrogate"),
        ({"a": {"\ud800": 1}}, "unpaired surrogate"),
        ({"a": {f"x{number}": 1 for number in range(1001)}}, "at most 1,000, got 1,001"),
        ({f"x{number}": 1 for number in range(1001)}, "at most 1,000 fields, got 1,001"),
    ],
)
def test_metadata_that_cannot_be_stored_are_refused(indexes: Indexes, metadata: dict[str, Any], said: str) -> None:
    app = create_application(open_service({"dense": indexes.dense}, access=Access(TOKEN)))
    content = json.dumps({"documents": [{"id": "x", "text": "", "metadata": metadata}]})
    headers = {**AUTHORISED, "content-type": "application/json"}
    response = answer(app, "POST", "/v1/documents", content=content, headers=headers)
    assert response.status_code == 422
    assert said in response.json()["error"]["message"]
    assert len(open_index(indexes.dense)) == 60


def test_a_null_is_as_if_the_field_were_not_there(app: Any) -> None:
    nulls = dict.fromkeys(("k", "offset", "retriever", "filter", "effort", "target_recall", "explain", "facets", "group_by"))
    assert search(app, query="bird", **nulls).json()["hits"] == search(app, query="bird").json()["hits"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("reported", [False, True])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_a_full_or_locked_disk_is_one_line_and_changes_nothing(
    indexes: Indexes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int, reported: bool, method: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        fault = OSError(number, os.strerror(number), str(indexes.dense / "tmp"))
        if not reported:
            raise fault
        raise InputError("cannot be written") from fault

    app = create_application(open_service({"dense": indexes.dense}, access=Access(TOKEN)))
    name = "add_documents" if method == "POST" else "delete_documents"
    monkeypatch.setattr(f"quiver.retrieval.serving.indexes.{name}", fail)
    body = {"documents": [{"id": "new", "text": "snow"}]} if method == "POST" else {"ids": ["d/7"]}
    response = answer(app, method, "/v1/documents", json=body, headers=AUTHORISED)
    full = number == errno.ENOSPC
    assert refused(response) == ((507, "no_space") if full else (409, "not_changed"))
    assert str(indexes.dense) not in response.text
    assert all(record.exc_info is None and "\n" not in record.getMessage() for record in caplog.records)
    assert search(app, query="bird", k=50).json()["generation"] == 1


def test_a_disk_that_fills_while_documents_are_added_leaves_the_index_as_it_was(indexes: Indexes, tmp_path: Path) -> None:
    """The files of the process may not grow beyond 4 KB: writing fails inside the index, as it does on a full disk."""
    shutil.copytree(indexes.dense, tmp_path / "index")
    app = create_application(open_service({"dense": tmp_path / "index"}, access=Access(TOKEN)))
    before = search(app, query="bird", k=20).json()
    body = {"documents": [{"id": f"new {number}", "text": "snow " * 400} for number in range(50)]}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        failed = answer(app, "POST", "/v1/documents", json=body, headers=AUTHORISED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused(failed) == (507, "no_space"), failed.text
    after = search(app, query="bird", k=20).json()
    assert (after["hits"], after["generation"]) == (before["hits"], before["generation"])
    assert answer(app, "POST", "/v1/documents", json=body, headers=AUTHORISED).json()["documents"] == 110


def test_every_token_is_compared_in_constant_time(indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_application(open_service({"dense": indexes.dense}, access=Access(TOKEN, "another token of enough characters")))
    compared: list[bytes] = []
    monkeypatch.setattr("hmac.compare_digest", lambda given, allowed: compared.append(allowed) is None)
    assert answer(app, "GET", "/v1/info", headers={"Authorization": "Bearer wrong"}).status_code == 200
    assert len(set(compared)) == 2  # also where the first one is the right one


def test_a_change_is_completed_when_its_client_disconnects(indexes: Indexes, tmp_path: Path) -> None:
    """The document is found by the next search of the service, which watches for no newer generation here."""
    shutil.copytree(indexes.dense, tmp_path / "index")
    service = open_service({"dense": tmp_path / "index"}, access=Access(TOKEN))
    app = create_application(service)
    model, begun, release = service.indexes[0].current.model, threading.Event(), threading.Event()
    encode = model.encode_texts

    def held(texts: Any, role: Any, **options: Any) -> Any:
        begun.set()
        assert release.wait(60)
        return encode(texts, role, **options)

    model.encode_texts = held  # type: ignore[method-assign]
    content = json.dumps({"documents": [{"id": "new", "text": "snow"}]}).encode()
    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/documents", "query_string": b"", "headers": headers, "http_version": "1.1"}

    async def talk() -> None:
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            while not begun.is_set():
                await asyncio.sleep(0.01)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            pytest.fail(f"the client has gone: {message}")

        await app({**scope, "root_path": "", "raw_path": b"/v1/documents", "scheme": "http"}, receive, send)
        release.set()
        end = time.monotonic() + 60
        while service.indexes[0].current.number == 1 and time.monotonic() < end:
            await asyncio.sleep(0.01)

    asyncio.run(talk())
    assert service.indexes[0].current.number == 2
    assert answer(app, "GET", "/v1/documents/new").status_code == 200


def test_the_service_waits_for_another_writer(indexes: Indexes, tmp_path: Path) -> None:
    folder, begun, release = tmp_path / "index", threading.Event(), threading.Event()
    shutil.copytree(indexes.dense, folder)
    service = open_service({"dense": folder}, access=Access(TOKEN), limits=Limits(lock_seconds=0.05))
    model = service.indexes[0].current.model

    class Held:
        card = model.card

        def encode_texts(self, texts: Any, role: Any, *, progress: bool = False) -> Any:
            begun.set()
            assert release.wait(60)
            return model.encode_texts(texts, role)

    def add(app: Any, key: str) -> Any:
        return answer(app, "POST", "/v1/documents", json={"documents": [{"id": key, "text": "sea"}]}, headers=AUTHORISED)

    writer = threading.Thread(target=add_documents, args=(folder, [Document("held", "snow")], Held()))
    writer.start()
    try:
        assert begun.wait(60)
        refusal = add(create_application(service), "impatient")
        assert refused(refusal) == (409, "not_changed")
        assert "still writing to this index after 0.05 s" in refusal.text
        threading.Timer(0.5, release.set).start()
        assert add(create_application(open_service({"dense": folder}, access=Access(TOKEN))), "patient").status_code == 200
    finally:
        release.set()
        writer.join(60)
    assert list(open_index(folder).ids)[-2:] == ["held", "patient"]


def test_the_schema_describes_every_route_and_its_errors(app: Any) -> None:
    schema = answer(app, "GET", "/openapi.json").json()
    assert len(schema["paths"]) == 16
    for path in schema["paths"].values():
        for operation in path.values():
            assert {"200", "408", "413", "429", "500"} <= set(operation["responses"])


def test_retrievers_have_names_and_models(indexes: Indexes) -> None:
    with pytest.raises(InputError, match="reserved for BM25"):
        open_service({"bm25": indexes.dense}, combined=Combinations(words=True))
    with pytest.raises(InputError, match="built without texts"):
        open_service({"silent": indexes.silent}, combined=Combinations(words=True))
    with pytest.raises(ValueError, match="k must be > 0"):
        Limits(k=0)
