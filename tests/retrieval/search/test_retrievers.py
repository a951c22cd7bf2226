"""Retrievers opened by folder: the stages of a fused and re-ranked search, and searches in several threads."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver import build_index
from quiver.encoder.errors import InputError
from quiver.retrieval.records import Document, Query
from quiver.retrieval.search import retrievers
from quiver.retrieval.search.bm25 import word_index
from quiver.retrieval.search.retrievers import (
    FusedRetriever,
    IndexSearcher,
    OpenIndexes,
    RerankedRetriever,
    Scorer,
    SharedModel,
    open_retriever,
)
from quiver.retrieval.search.search import Fusion, fuse_runs, rerank

DOCUMENTS = [Document(f"d{number}", f"word{number % 4} text{number % 3} end", metadata={"part": number}) for number in range(24)]
QUERIES = [Query("q1", "word1 text2"), Query("q2", "word3 end")]


@pytest.fixture
def stages(tmp_path: Path, word_sum: Any, word_by_word: Any) -> RerankedRetriever:
    dense, tokens = build_index(DOCUMENTS, word_sum, tmp_path / "dense"), build_index(DOCUMENTS, word_by_word, tmp_path / "tokens")
    fused = FusedRetriever(
        [IndexSearcher(dense, SharedModel(word_sum), "dense"), IndexSearcher(word_index(dense))], Fusion("weighted"), candidates=9
    )
    return RerankedRetriever(fused, Scorer("tokens", SharedModel(word_by_word), tokens), candidates=6)


def test_a_result_holds_the_run_of_every_stage(stages: RerankedRetriever) -> None:
    found = stages.search(QUERIES, 3, filter="part < 20")
    assert isinstance(stages.first, FusedRetriever)
    lists = {part.name: part.search(QUERIES, 9, filter="part < 20") for part in stages.first.parts}
    assert {name: hits.ids for name, hits in found.lists.items()} == {name: hits.ids for name, hits in lists.items()}
    assert found.candidates is not None
    names = ["q1", "q2"]
    assert found.candidates.to_run(names) == fuse_runs([hits.to_run(names) for hits in lists.values()], Fusion("weighted"), k=6)
    assert found.to_run(names) == rerank(found.candidates, [query.text for query in QUERIES], stages.scorer, 3).to_run(names)
    assert sorted(found.seconds) == ["encode", "fuse", "rerank", "search"]
    assert {len(documents) for documents in found.ids} == {3}
    assert set(stages.first.explain("word1 text2", ["d1", "d2"])["d1"]) == {"dense", "bm25"}


def test_several_threads_search_one_retriever(stages: RerankedRetriever) -> None:
    wanted = stages.search(QUERIES, 5).ids
    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(lambda _: stages.search(QUERIES, 5).ids, range(20)))
    assert runs == [wanted] * 20


@pytest.mark.parametrize("stored", [True, False])
def test_an_index_fuses_and_reranks_its_own_search(tmp_path: Path, word_sum: Any, word_by_word: Any, stored: bool) -> None:
    dense = build_index(DOCUMENTS, word_sum, tmp_path / "dense" if stored else None)
    tokens = build_index([*DOCUMENTS, Document("other", "word1 word1")], word_by_word, tmp_path / "tokens")
    retriever = OpenIndexes()
    for index, model in ((dense, word_sum), (tokens, word_by_word)):
        index.model = model
        retriever.index(index)
    texts = [query.text for query in QUERIES]
    for fuse in ("bm25", [tokens, "bm25"], tokens):
        given = [getattr(each, "path", each) for each in (fuse if isinstance(fuse, list) else [fuse])]
        library, filter = retriever.fused([dense.path, *given]), "part < 20" if fuse == "bm25" else None
        found = dense.search(texts, 9, fuse=fuse, filter=filter)
        expected = library.search(QUERIES, 9, filter=filter)
        assert found.ids == expected.ids
        assert np.allclose(found.scores[1], expected.scores[1])
        assert [hit.text for hit in found[0]] == [retriever.text_of(hit.id) for hit in found[0]]
    reranked = retriever.reranked(retriever.fused([dense.path, tokens.path]), tokens.path).search(QUERIES, 5).ids
    assert dense.search(texts, 5, fuse=tokens, rerank=tokens.path).ids == reranked
    assert dense.search(texts, 5, fuse=tokens, rerank=tokens).ids == reranked
    by_model = retriever.reranked(retriever.fused([dense.path]), word_by_word).search(QUERIES, 5).ids
    assert dense.search(texts, 5, rerank=word_by_word).ids == by_model
    with pytest.raises(InputError, match=r"rerank=\) needs a ColBERT model or an index of one; this model gives a single vector"):
        dense.search(texts, rerank=word_sum)
    with pytest.raises(InputError, match=r"rerank=\) needs a ColBERT model or an index of one, got a dict"):
        dense.search(texts, rerank={})  # type: ignore[call-overload]
    assert list(dense.search(texts[0], 3, fuse="bm25")) == list(dense.search(texts, 3, fuse=["bm25"])[0])
    grouped = dense.search(texts[0], 5, fuse="bm25", group_by="part")
    assert [hit.group for hit in grouped] == [str(DOCUMENTS[int(hit.id[1:])].metadata["part"]) for hit in grouped]  # type: ignore[index]
    with pytest.raises(InputError, match="an index in memory cannot be fused with another one"):
        dense.search(texts, fuse=build_index(DOCUMENTS, "bm25"))
    assert (len(dense.search([])), len(dense.search([], fuse="bm25"))) == (0, 0)
    with pytest.raises(InputError, match="fuse and rerank need queries that are texts"):
        dense.search(word_sum.encode_texts(texts, "query").vectors, fuse="bm25")


def test_what_an_index_is_fused_with_is_opened_once_and_freed_with_it(
    tmp_path: Path, word_sum: Any, word_by_word: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, tokens = build_index(DOCUMENTS, word_sum, tmp_path / "dense"), build_index(DOCUMENTS, word_by_word, tmp_path / "tokens")
    dense.model, tokens.model, made = word_sum, word_by_word, list[Path]()
    counted: Any = retrievers.word_index
    monkeypatch.setattr(retrievers, "word_index", lambda index, **options: made.append(index.path) or counted(index, **options))
    fusions: list[Any] = ["bm25", ["bm25", tokens], [tokens, "bm25"], tokens] * 2
    with ThreadPoolExecutor(8) as threads:
        for waiting in [threads.submit(dense.search, "word1 text2", 3, fuse=fuse) for fuse in fusions]:
            assert len(waiting.result()) == 3
    del waiting
    assert made == [dense.path]
    gc.disable()
    try:
        alive = weakref.ref(dense)
        del dense
        assert alive() is None
    finally:
        gc.enable()


def test_bm25_needs_an_index_for_its_documents() -> None:
    with pytest.raises(InputError, match="bm25 ranks the documents of an index; name an index too"):
        open_retriever("bm25")
    with pytest.raises(InputError, match="got 2 weights for 1 rankings"):
        OpenIndexes().fused(["i"], Fusion(weights=(1, 2)))


def test_an_index_of_bm25_is_not_fused_with_itself(tmp_path: Path) -> None:
    build_index(["a text about birds", "a text about salt"], "bm25", tmp_path / "words")
    with pytest.raises(InputError, match="an index of BM25, which bm25 would fuse with itself; leave out bm25"):
        OpenIndexes().fused([tmp_path / "words", "bm25"])


def test_a_thread_that_is_interrupted_while_it_waits_for_a_model_leaves_the_queue(word_sum: Any, request: pytest.FixtureRequest) -> None:
    # Background jobs of some shells ignore SIGINT.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler)))
    shared, main = SharedModel(word_sum), threading.main_thread().ident
    assert main is not None
    with ThreadPoolExecutor(1) as pool:
        with shared.lock:
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                shared.encode_texts(["a word"], "query")
        assert len(pool.submit(shared.encode_texts, ["another word"], "query").result(timeout=10).vectors) == 1
