"""Embeddings and re-ranking in the forms of OpenAI, Jina, Cohere, vLLM and text-embeddings-inference."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quiver.retrieval.index import open_index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.serving.application import create_application
from quiver.retrieval.serving.schemas import Limits
from quiver.retrieval.serving.service import Combinations, open_service
from tests.retrieval.serving.conftest import Indexes, answer, httpx

TEXTS = ["a bird on the sea", "granite and snow", "", "deep water is dark at night, and wide rivers swim"]


@pytest.fixture(scope="module")
def app(indexes: Indexes) -> Any:
    return create_application(
        open_service({"dense": indexes.dense, "colbert": indexes.colbert}, combined=Combinations(words=True), limits=Limits(texts=8))
    )


@pytest.fixture(scope="module")
def dense(indexes: Indexes) -> BiEncoder:
    model = load_model(open_index(indexes.dense).manifest.model.source)
    assert isinstance(model, BiEncoder)
    return model


@pytest.fixture(scope="module")
def colbert(indexes: Indexes) -> ColBERT:
    model = load_model(open_index(indexes.colbert).manifest.model.source)
    assert isinstance(model, ColBERT)
    return model


def unit(vectors: Any) -> Any:
    return np.asarray(vectors) / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_embeddings_have_openais_shape_and_the_models_values(app: Any, dense: BiEncoder) -> None:
    found = answer(app, "POST", "/v1/embeddings", json={"model": "dense", "input": TEXTS}).json()
    assert set(found) == {"object", "data", "model", "usage"}
    assert (found["object"], found["model"]) == ("list", "dense")
    assert [(each["object"], each["index"]) for each in found["data"]] == [("embedding", row) for row in range(4)]
    assert np.array([each["embedding"] for each in found["data"]]) == pytest.approx(unit(dense.encode_document(TEXTS)), abs=1e-6)
    tokens = sum(map(len, dense.tokenize(TEXTS, "document").ids))
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    coded = answer(app, "POST", "/v1/embeddings", json={"model": "dense", "input": TEXTS, "encoding_format": "base64"}).json()
    for one, other in zip(coded["data"], found["data"], strict=True):
        assert np.frombuffer(base64.b64decode(one["embedding"]), "<f4").tolist() == pytest.approx(other["embedding"])


def test_embeddings_of_one_text_of_queries_of_token_ids_and_of_fewer_dimensions(app: Any, dense: BiEncoder) -> None:
    def embed(**request: Any) -> Any:
        data = answer(app, "POST", "/v1/embeddings", json={"model": "dense", **request}).json()["data"]
        return np.array([each["embedding"] for each in data])

    assert embed(input="a bird")[0] == pytest.approx(unit(dense.encode_document("a bird")), abs=1e-6)
    assert embed(input=["a bird"], input_type="query") == pytest.approx(unit(dense.encode_query(["a bird"])), abs=1e-6)
    ids = dense.tokenize(TEXTS, "document").ids
    assert embed(input=ids) == pytest.approx(embed(input=TEXTS), abs=1e-6)
    assert embed(input=ids[0])[0] == pytest.approx(embed(input=TEXTS[0])[0], abs=1e-6)
    assert embed(input=TEXTS, dimensions=8) == pytest.approx(unit(dense.encode_document(TEXTS, truncate_dim=8)), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        ({"model": "none", "input": "a"}, 404, "unknown_model", "no such model; the models are dense"),
        ({"model": "colbert", "input": "a"}, 422, "invalid_request", "colbert is a ColBERT model"),
        ({"model": "bm25", "input": "a"}, 404, "unknown_model", "no such model"),
        ({"model": "dense", "input": []}, 422, "invalid_request", "body.input"),
        ({"model": "dense", "input": [[]]}, 422, "invalid_request", "body.input"),
        ({"model": "dense", "input": [5000]}, 422, "invalid_request", "token id outside of the vocabulary, 0 to 383"),
        ({"model": "dense", "input": [-1]}, 422, "invalid_request", "token id outside of the vocabulary"),
        ({"model": "dense", "input": [1] * 65}, 422, "invalid_request", "65 tokens; a text of this model has 1 to 64"),
        ({"model": "dense", "input": "a", "dimensions": 33}, 422, "invalid_request", "at most 32, the width of this model, got 33"),
        ({"model": "dense", "input": ["a"] * 9}, 422, "beyond_limit", "texts per request: at most 8 (--max-texts), got 9"),
        ({"model": "dense", "input": "a", "surprise": 1}, 422, "invalid_request", "unknown field 'surprise'; the fields are input, model"),
    ],
)
def test_embeddings_that_cannot_be_made_are_refused(app: Any, body: dict[str, Any], status: int, code: str, said: str) -> None:
    response = answer(app, "POST", "/v1/embeddings", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert said in response.json()["error"]["message"]


def test_rerank_has_the_shape_of_jina_and_vllm_and_the_models_scores(app: Any, colbert: ColBERT, dense: BiEncoder) -> None:
    query = "which bird can swim?"
    documents = [TEXTS[0], {"text": TEXTS[1]}, TEXTS[3], TEXTS[0]]
    texts = [TEXTS[0], TEXTS[1], TEXTS[3], TEXTS[0]]
    for path in ("/v1/rerank", "/rerank"):
        found = answer(app, "POST", path, json={"model": "colbert", "query": query, "documents": documents}).json()
        assert set(found) == {"id", "model", "results", "usage"}
        vectors = colbert.encode_query([query])
        expected = (colbert.similarity(vectors, colbert.encode_document(texts))[0] / len(vectors[0])).tolist()
        assert [each["relevance_score"] for each in found["results"]] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
        assert all(each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-5) for each in found["results"])
        assert all(each["document"] == {"text": texts[each["index"]]} for each in found["results"])
        same = [each["index"] for each in found["results"] if texts[each["index"]] == TEXTS[0]]
        assert same == [0, 3]  # equal scores keep their order
        tokens = len(colbert.tokenize([query], "query").ids[0]) + sum(map(len, colbert.tokenize(texts, "document").ids))
        assert found["usage"] == {"total_tokens": tokens}
    best = answer(app, "POST", "/v1/rerank", json={"query": query, "documents": documents, "top_n": 1, "return_documents": False}).json()
    assert best["model"] == "colbert"  # the first ColBERT model is the default
    assert best["results"] == [found["results"][0] | {"document": None}]
    by_vectors = answer(app, "POST", "/v1/rerank", json={"model": "dense", "query": query, "documents": texts}).json()["results"]
    cosines = dense.similarity(dense.encode_query([query]), dense.encode_document(texts))[0].tolist()
    assert {each["index"]: each["relevance_score"] for each in by_vectors} == pytest.approx(dict(enumerate(cosines)), abs=1e-5)


def test_rerank_and_embed_have_the_shapes_of_text_embeddings_inference(app: Any, colbert: ColBERT, dense: BiEncoder) -> None:
    texts = [TEXTS[1], TEXTS[0], TEXTS[3]]
    found = answer(app, "POST", "/rerank", json={"query": "bird", "texts": texts, "raw_scores": True, "return_text": True}).json()
    expected = colbert.similarity(colbert.encode_query(["bird"]), colbert.encode_document(texts))[0].tolist()
    assert [set(each) for each in found] == [{"index", "score", "text"}] * 3
    assert [each["score"] for each in found] == pytest.approx(sorted(expected, reverse=True), abs=1e-4)
    assert all(each["text"] == texts[each["index"]] for each in found)
    plain = answer(app, "POST", "/rerank", json={"query": "bird", "texts": texts}).json()
    terms = len(colbert.encode_query(["bird"])[0])
    assert [each["score"] * terms for each in plain] == pytest.approx([each["score"] for each in found], abs=1e-4)
    vectors = answer(app, "POST", "/embed", json={"inputs": texts}).json()
    assert np.array(vectors) == pytest.approx(unit(dense.encode_document(texts)), abs=1e-6)
    raw = answer(app, "POST", "/embed", json={"inputs": "bird", "normalize": False, "prompt_name": "query", "dimensions": 4}).json()
    assert raw == [pytest.approx(dense.encode_query("bird")[:4].tolist(), abs=1e-6)]
    long = "sea " * 500
    for path, body in (("/embed", {"inputs": [long]}), ("/rerank", {"query": "sea", "texts": ["a", long]})):
        assert answer(app, "POST", path, json=body).status_code == 200
        for options in ({"truncate": False}, {"truncation_direction": "Left"}):  # Left would keep the end of a text
            refusal = answer(app, "POST", path, json=body | options)
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (422, "too_long")
    assert answer(app, "POST", "/embed", json={"inputs": texts, "truncation_direction": "Left"}).json() == vectors


def test_cohere_and_clients_that_send_nulls_are_answered(app: Any) -> None:
    documents = [{"text": TEXTS[0], "id": 7}, TEXTS[1]]
    request = {"model": "colbert", "query": "bird", "documents": documents, "top_n": 1}
    expected = answer(app, "POST", "/v1/rerank", json=request).json()["results"]
    found = answer(app, "POST", "/v2/rerank", json=request | {"max_tokens_per_doc": 4096, "priority": 1})
    assert (found.status_code, found.json()["results"]) == (200, expected)
    for version, more in (("v1", {"max_chunks_per_doc": 10, "rank_fields": ["text"]}), ("v2", {"max_tokens_per_doc": None})):
        assert answer(app, "POST", f"/{version}/rerank", json=request | more).json()["results"] == expected
    for path, plain, nulls in (
        ("/embed", {"inputs": TEXTS}, {"normalize": None, "truncate": None, "prompt_name": None, "dimensions": None}),
        ("/rerank", {"query": "bird", "texts": TEXTS}, {"raw_scores": None, "return_text": None, "truncate": None}),
        ("/v1/embeddings", {"model": "dense", "input": "a"}, {"encoding_format": None, "dimensions": None, "user": None}),
    ):
        asked = plain | nulls | ({} if path.startswith("/v1") else {"truncation_direction": "Right"})
        response = answer(app, "POST", path, json=asked)
        assert (response.status_code, response.json()) == (200, answer(app, "POST", path, json=plain).json()), path


def test_the_address_without_a_path_embeds_and_re_ranks(app: Any) -> None:
    for path, body in (
        ("/embed", {"inputs": TEXTS, "normalize": False}),
        ("/rerank", {"query": "bird", "texts": TEXTS, "raw_scores": True}),
    ):
        assert answer(app, "POST", "/", json=body).json() == answer(app, "POST", path, json=body).json()
    assert answer(app, "GET", "/").headers["content-type"].startswith("text/html")


def test_documents_are_ranked_by_the_fields_that_are_named(app: Any) -> None:
    documents = [{"title": "Stone", "body": "granite", "year": 7}, {"title": "Bird", "body": None, "text": "unused"}, "a text"]
    request = {"model": "dense", "query": "bird", "documents": documents, "rank_fields": ["title", "body", "year"]}
    found = answer(app, "POST", "/v1/rerank", json=request).json()["results"]
    plain = {"model": "dense", "query": "bird", "documents": ["Stone granite 7", "Bird", "a text"]}
    expected = answer(app, "POST", "/v1/rerank", json=plain).json()["results"]
    assert [(each["index"], each["relevance_score"]) for each in found] == [(each["index"], each["relevance_score"]) for each in expected]
    shown = [{"title": "Stone", "body": "granite", "year": 7}, {"title": "Bird"}, {"text": "a text"}]
    assert [each["document"] for each in found] == [shown[each["index"]] for each in found]
    for document, said in (
        ({"name": "x"}, "body.documents.0: has none of the fields to rank: text"),
        ({"text": ["x"]}, "body.documents.0.text: must be text or a number"),
        ({"text": {"a": 1}}, "body.documents.0.text: must be text or a number"),
    ):
        response = answer(app, "POST", "/v1/rerank", json={"query": "bird", "documents": [document]})
        assert (response.status_code, response.json()["error"]["message"]) == (422, said)


def test_text_that_is_not_utf8_is_refused_in_one_line(app: Any) -> None:
    for path, body in (
        ("/v1/embeddings", {"model": "dense", "input": ["a", "\ud800"]}),
        ("/embed", {"inputs": "\ud800"}),
        ("/rerank", {"query": "a", "texts": ["\ud800"]}),
        ("/v1/rerank", {"query": "a", "documents": [{"text": "\ud800"}]}),
        ("/v1/search", {"query": "a", "filter": "lang = '\ud800'"}),
    ):
        response = answer(app, "POST", path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert response.status_code == 422, path
        message = response.json()["error"]["message"]
        assert "valid UTF-8" in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/rerank", {"query": "cat", "documents": [1] * 330_000}),
        ("/rerank", {"query": "cat", "texts": [1] * 330_000}),
        ("/v1/embeddings", {"model": "dense", "input": [None] * 200_000}),
        ("/v1/search/batch", {"queries": [1] * 330_000}),
        ("/v1/search", {"query": "cat", "filter": [1] * 330_000}),
    ],
)
def test_a_large_invalid_list_does_not_stop_the_service(app: Any, path: str, body: Any) -> None:
    async def ask() -> tuple[Any, Any, float]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            content = json.dumps(body, separators=(",", ":"))
            begun = time.process_time()
            invalid = client.post(path, content=content, headers={"content-type": "application/json"})
            found = await asyncio.gather(invalid, client.get("/healthz"))
            return (*found, time.process_time() - begun)

    refusal, healthy, seconds = asyncio.run(ask())
    assert (refusal.status_code, healthy.status_code) == (422, 200)
    assert len(refusal.json()["error"]["message"]) <= 500
    assert seconds < 1


def test_models_are_listed_as_openai_does(app: Any, indexes: Indexes) -> None:
    listed = answer(app, "GET", "/v1/models").json()
    assert listed["object"] == "list"
    assert [(each["id"], each["object"], each["kind"], each["dimensions"]) for each in listed["data"]] == [
        ("dense", "model", "dense", 32),
        ("colbert", "model", "colbert", 16),
    ]
    assert answer(app, "GET", "/v1/models/dense").json() == listed["data"][0]
    assert answer(app, "GET", f"/v1/models/{listed['data'][1]['root']}").json() == listed["data"][1]
    assert answer(app, "GET", "/v1/models/none").status_code == 404
    assert str(indexes.dense.parent.parent) not in str(listed)


def test_a_search_goes_before_the_next_piece_of_many_texts(indexes: Indexes, dense: BiEncoder) -> None:
    """256 long texts, of which a slow model encodes one piece per turn: a search waits for the piece that runs, and no other."""
    service = open_service({"dense": indexes.dense}, limits=Limits(seconds=60))
    app = create_application(service)
    shared = service.indexes[0].current.model
    turns: list[tuple[str, int]] = []
    begun = threading.Event()
    encode = shared.model.encode_texts

    def slow(texts: Any, role: Any, **options: Any) -> Any:
        turns.append((role, len(texts)))
        begun.set()
        time.sleep(0.05)
        return encode(texts, role, **options)

    shared.model = SimpleNamespace(encode_texts=slow)
    texts = [f"{number} " + "deep sea " * 100 for number in range(256)]

    async def ask() -> tuple[Any, list[tuple[str, int]], Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service", timeout=60) as client:
            embedding = asyncio.ensure_future(client.post("/embed", json={"inputs": texts, "normalize": False}))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            found = await client.post("/v1/search", json={"query": "bird"})
            before = list(turns)
            assert not embedding.done()
            return found, before, await embedding

    found, before, embedded = asyncio.run(ask())
    assert found.status_code == embedded.status_code == 200
    # The piece that ran when the search came, the query, and the piece that began while the answer was on its way.
    assert [role for role, _ in before].index("query") <= 2
    pieces = [size for role, size in turns if role == "document"]
    assert (sum(pieces), max(pieces)) == (256, 32)  # the model reads 64 tokens of a text
    assert np.array(embedded.json()) == pytest.approx(dense.encode_document(texts), abs=1e-5)


@pytest.mark.slow
def test_the_openai_client_embeds_and_lists_models(indexes: Indexes, serving: Any, dense: BiEncoder, tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    token = tmp_path / "token"
    token.write_text("a reading token of enough characters")
    with serving(f"dense={indexes.dense}", "--read-token-file", token) as child:
        client = openai.OpenAI(base_url=f"{child.url}/v1", api_key=token.read_text(), max_retries=0)
        assert [each.id for each in client.models.list()] == ["dense"]
        assert client.models.retrieve("dense").owned_by == "quiver"
        found = client.embeddings.create(model="dense", input=TEXTS)  # the client asks for base64 and decodes it
        assert np.array([each.embedding for each in found.data]) == pytest.approx(unit(dense.encode_document(TEXTS)), abs=1e-6)
        assert found.usage.total_tokens > 4
        assert len(client.embeddings.create(model="dense", input="a", dimensions=8, encoding_format="float").data[0].embedding) == 8
        with pytest.raises(openai.NotFoundError, match="the models are dense"):
            client.embeddings.create(model="text-embedding-3-small", input="a")
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{child.url}/v1", api_key="another", max_retries=0).models.list()
