"""Exports to Qdrant and LanceDB: the stores hold the data of the index and find its hits with the same scores, also after interruptions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import read_documents, read_queries
from quiver.retrieval.index import BuildOptions, Index, add_documents, build_index, delete_documents, open_index
from quiver.retrieval.integrations import export_to, stores
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import Document, Role, TokenEncoding

Found = list[tuple[str, float]]


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Import both stores before the first test here: collecting the tests, in each process, should not take the seconds that this takes."""
    global lance, lancedb, qdrant, qdrant_client
    qdrant_client = pytest.importorskip("qdrant_client")
    lancedb = pytest.importorskip("lancedb")
    from quiver.retrieval.integrations import lance, qdrant


def same(found: Found, index: Index, query: NDArray[np.float32], k: int, *, tolerance: float = 1e-4) -> None:
    """Check that hits are the k best of exact search: equal scores by rank, and each document with its own score; ties may be reordered."""
    hits = index.search([query] if query.ndim == 2 else query[None], k, effort="exact")
    np.testing.assert_allclose([score for _, score in found], hits.scores[0], atol=tolerance, rtol=1e-5)
    np.testing.assert_allclose([score for _, score in found], index.scores(query, [key for key, _ in found]), atol=tolerance, rtol=1e-5)
    assert len({key for key, _ in found}) == min(k, len(index))


def queries(model: Any) -> list[NDArray[np.float32]]:
    return list(model.encode_texts(["word1 word2", "other3", "titled word6 word0"], "query").vectors)


def test_qdrant_finds_what_the_index_finds(index: Index, model: Any) -> None:
    client = qdrant.open_client(":memory:")
    assert qdrant.write_collection(index, client, "birds") == len(index)
    for query in queries(model):
        same(qdrant.search_collection(client, "birds", query, 10, candidates=None), index, query, 10)
        if query.ndim == 2:  # as many candidates as there are documents: nothing can be missed
            same(qdrant.search_collection(client, "birds", query, 10, candidates=len(index)), index, query, 10)
    (point,) = client.retrieve("birds", [stores.point_id("d3")])
    del point.payload[qdrant.STATE]
    assert point.payload == {"id": "d3", "title": "titled", "text": "word3 word3 other3", "metadata": {"part": 3, "odd": True}}
    condition = qdrant_client.models.FieldCondition(key="metadata.odd", match=qdrant_client.models.MatchValue(value=True))
    assert client.count("birds", count_filter=qdrant_client.models.Filter(must=[condition])).count == 11


def test_lancedb_finds_what_the_index_finds(index: Index, model: Any, tmp_path: Path) -> None:
    assert lance.write_table(index, tmp_path / "lance", "birds") == len(index)
    for query in queries(model):
        if query.ndim == 1:
            same(lance.search_table(tmp_path / "lance", "birds", query, 10), index, query, 10)
        else:
            same(lance.search_table(tmp_path / "lance", "birds", query, 10), index, query, 10, tolerance=1e-3)
    table = lancedb.connect(tmp_path / "lance").open_table("birds")
    (row,) = table.search().where("id = 'd3'").select(["title", "text", "metadata"]).to_list()
    row.pop("_rowid", None)
    assert (row["title"], row["text"], json.loads(row["metadata"])) == ("titled", "word3 word3 other3", {"part": 3, "odd": True})


def ids_in(store: str, tmp_path: Path, name: str) -> list[str]:
    if store == "lancedb":
        return sorted(row["id"] for row in lancedb.connect(tmp_path / store).open_table(name).search().limit(1000).to_list())
    client = qdrant.open_client(str(tmp_path / store))
    try:
        found, _ = client.scroll(name, limit=1000)
        return sorted(point.payload["id"] for point in found)
    finally:
        client.close()


@pytest.mark.parametrize("store", ["qdrant", "lancedb"])
def test_an_interrupted_export_is_resumed_and_a_newer_generation_replaces_rows(
    store: str, index: Index, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, name = (qdrant_client.QdrantClient, "upsert") if store == "qdrant" else (lancedb.table.LanceTable, "add")
    send, sent = getattr(library, name), []

    def interrupted(*given: Any, **settings: Any) -> Any:
        if len(sent) == 2:
            raise KeyboardInterrupt
        sent.append(given)
        return send(*given, **settings)

    def write(now: Index) -> int:
        return export_to(now, f"{store}://{tmp_path / store}", batch_documents=5).written

    with monkeypatch.context() as patched:
        patched.setattr(library, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(index)
    assert len(ids_in(store, tmp_path, "birds")) == 10
    assert write(index) == 13
    assert ids_in(store, tmp_path, "birds") == sorted(index.ids)
    assert write(index) == 0
    delete_documents(index.path, ["d2", "d11"])
    newer = add_documents(index.path, [Document("d40", "word1 new")], model)
    assert write(newer) == 22
    assert ids_in(store, tmp_path, "birds") == sorted(newer.ids)


@pytest.mark.parametrize("store", ["qdrant", "lancedb"])
def test_documents_without_texts_or_vectors_are_exported(store: str, word_by_word: Any, tmp_path: Path) -> None:
    corpus = [Document("full", "word1 word2"), Document("empty", "")]
    index = build_index(corpus, word_by_word, tmp_path / "i", options=BuildOptions(engine="exact", store_text=False))
    assert export_to(index, f"{store}://{tmp_path / store}", collection="c").written == 2
    assert ids_in(store, tmp_path, "c") == ["empty", "full"]
    query = word_by_word.encode_texts(["word1"], "query").vectors[0]
    if store == "lancedb":
        found = lance.search_table(tmp_path / store, "c", query, 10)
    else:
        client = qdrant.open_client(str(tmp_path / store))
        found = qdrant.search_collection(client, "c", query, 10)
        client.close()
    assert [key for key, _ in found] == ["full"]
    assert found[0][1] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("store", ["qdrant", "lancedb"])
def test_a_collection_for_other_vectors_is_not_replaced(store: str, word_sum: Any, word_by_word: Any, tmp_path: Path) -> None:
    options, target = BuildOptions(engine="exact"), f"{store}://{tmp_path / store}"
    corpus = [Document("d1", "word1 word2"), Document("d2", "word3")]
    export_to(build_index(corpus, word_sum, tmp_path / "dense", options=options), target, collection="c")
    other = build_index(corpus[:1], word_by_word, tmp_path / "tokens", options=options)
    with pytest.raises(InputError, match="exists for other vectors; choose another --collection, or pass --overwrite"):
        export_to(other, target, collection="c")
    assert ids_in(store, tmp_path, "c") == ["d1", "d2"]
    export_to(other, target, collection="c", overwrite=True)
    assert ids_in(store, tmp_path, "c") == ["d1"]


def test_lancedb_refuses_token_vectors_that_are_not_of_unit_length(word_by_word: Any, tmp_path: Path) -> None:
    class Doubled:
        card = word_by_word.card

        def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
            encoding = word_by_word.encode_texts(texts, role)
            return replace(encoding, vectors=[2 * vectors for vectors in encoding.vectors])

    index = build_index([Document("d1", "word1")], Doubled(), tmp_path / "i", options=BuildOptions(engine="exact"))
    with pytest.raises(InputError, match="document 'd1' has vectors that are not of unit length"):
        export_to(index, f"lancedb://{tmp_path / 'lance'}")


def test_the_export_command_writes_to_a_store(quiver: Callable[..., Any], index: Index, tmp_path: Path) -> None:
    done = quiver("index", "export", index.path, "--store", f"lancedb://{tmp_path / 'lance'}", "--json")
    stored = {"store": "lancedb", "where": str(tmp_path / "lance"), "collection": "birds", "documents": 23, "written": 23}
    assert (done.code, json.loads(done.out)) == (0, stored)
    for arguments, message in (
        (("--store", "weaviate://x"), "must be qdrant://FOLDER_OR_ADDRESS, lancedb://FOLDER"),
        (("--store", "qdrant://"), "must be qdrant://"),
        (("--store", "qdrant://x", "--out", "y"), "pass either --out FOLDER"),
        ((), "pass either --out FOLDER"),
        (("--out", tmp_path / "files", "--collection", "c"), "--collection and --overwrite apply only to --store"),
        (("--store", f"qdrant://{tmp_path / 'q'}", "--collection", "a/b"), "--collection 'a/b': must be"),
        (("--store", "qdrant://http://127.0.0.1:9"), "Qdrant, collection 'birds': "),
    ):
        done = quiver("index", "export", index.path, *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1), done.err
        assert message in done.err


def test_a_missing_library_is_reported_in_one_line(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "quiver.retrieval.integrations.qdrant", None)
    monkeypatch.delattr("quiver.retrieval.integrations.qdrant")
    with pytest.raises(InputError, match=r"pip install 'quiver-retrieval\[interop\]'"):
        stores.export_to(index, f"qdrant://{tmp_path}")


def first_texts(quiver_data: Path, documents: int, asked: int) -> tuple[list[Document], list[str]]:
    corpus = list(itertools.islice(read_documents(quiver_data / "scifact"), documents))
    return corpus, [query.text for query in itertools.islice(read_queries(quiver_data / "scifact" / "queries.jsonl"), asked)]


def compared(index: Index, vectors: Sequence[NDArray[np.float32]], tmp_path: Path) -> None:
    client = qdrant.open_client(":memory:")
    qdrant.write_collection(index, client, "c")
    lance.write_table(index, tmp_path / "lance", "c")
    for query in vectors:
        same(qdrant.search_collection(client, "c", query, 10, candidates=None), index, query, 10)
        same(lance.search_table(tmp_path / "lance", "c", query, 10), index, query, 10, tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.data
def test_stores_agree_with_an_index_of_a_bi_encoder_over_real_texts(quiver_data: Path, minilm: Path, tmp_path: Path) -> None:
    corpus, texts = first_texts(quiver_data, 60, 8)
    model = load_model(minilm)
    index = build_index(corpus, model, tmp_path / "i", options=BuildOptions(engine="exact"))
    compared(index, list(model.encode_texts(texts, "query").vectors), tmp_path)
    assert open_index(tmp_path / "i").ids[0] == corpus[0].id


@pytest.mark.data
def test_stores_agree_with_an_index_of_a_colbert_model_over_real_texts(quiver_data: Path, colbert_minilm: Path, tmp_path: Path) -> None:
    corpus, texts = first_texts(quiver_data, 40, 5)
    model = load_model(colbert_minilm)
    index = build_index(corpus, model, tmp_path / "i", options=BuildOptions(engine="exact"))
    compared(index, list(model.encode_texts(texts, "query").vectors), tmp_path)
