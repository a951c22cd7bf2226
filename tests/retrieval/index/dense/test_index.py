"""Compressed dense engines in a store: built, added to, deleted from, filtered, compacted, and opened again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    BuildOptions,
    DamagedIndexError,
    Filter,
    add_documents,
    build_index,
    compact_index,
    delete_documents,
    open_index,
)
from quiver.retrieval.index import build as building
from quiver.retrieval.records import Document

WORDS = [f"w{number}" for number in range(60)]


def corpus(first: int, last: int) -> list[Document]:
    rng = np.random.default_rng(first)
    return [Document(f"d{number:04d}", " ".join(rng.choice(WORDS, 6)), "", {"even": number % 2 == 0}) for number in range(first, last)]


@pytest.mark.parametrize(
    ("engine", "settings"),
    [("pq-dense", {}), ("ivf-dense", {"nlist": 8}), ("faiss-dense", {"factory": "IVF8,SQ8", "bits": 16})],
)
def test_an_index_of_several_segments_is_searched_as_one(tmp_path: Path, word_sum: Any, engine: str, settings: Any) -> None:
    options = BuildOptions(engine=engine, settings=settings, memory=1 << 40)
    build_index(corpus(0, 500), word_sum, tmp_path / "i", options=options)
    index = add_documents(tmp_path / "i", corpus(500, 700), word_sum)
    assert index.kind == engine
    assert len(index.manifest.segments) == 2
    gone = [f"d{number:04d}" for number in range(0, 700, 5)]
    index = delete_documents(tmp_path / "i", gone)
    exact = build_index([each for each in corpus(0, 500) + corpus(500, 700) if each.id not in gone], word_sum, tmp_path / "exact")
    assert exact.kind == "exact-dense"
    queries = word_sum.encode_texts(["w1 w2 w3", "w4 w9", "w33 w7 w8 w50"], "query").vectors
    even = Filter.parse("even = true")
    for filter in (None, even):
        wanted = exact.search(queries, 10, filter=filter)
        for effort in ("exact", "balanced"):
            found = index.search(queries, 10, filter=filter, effort=effort)
            for ours, scores, theirs, exact_scores in zip(found.ids, found.scores, wanted.ids, wanted.scores, strict=True):
                assert len(ours) == len(theirs) == 10
                assert not {*ours} & {*gone}
                np.testing.assert_allclose(scores, exact_scores, atol=0.05)
                assert len({*ours} & {*theirs}) >= 7  # documents that share as many words with the query are near ties
    before = index.search(queries, 10, effort="exact")
    compacted = compact_index(tmp_path / "i")
    after = compacted.search(queries, 10, effort="exact")
    assert len(compacted.manifest.segments) == 1
    assert after.ids == before.ids
    np.testing.assert_array_equal(np.array(after.scores), np.array(before.scores))
    np.testing.assert_allclose(compacted.scores(queries[0], after.ids[0]), after.scores[0])
    with pytest.raises(InputError, match="has no search parameter 'nothing'"):
        index.search(queries, 3, effort={"nothing": 3})


def test_a_damaged_index_of_faiss_is_not_read(tmp_path: Path, word_sum: Any) -> None:
    options = BuildOptions(engine="faiss-dense", settings={"factory": "HNSW8,Flat"})
    index = build_index(corpus(0, 200), word_sum, tmp_path / "i", options=options)
    queries = word_sum.encode_texts(["word1"], "query").vectors
    for path in (tmp_path / "i").rglob("*.faiss"):
        content = path.read_bytes()
        path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
        for verify in (True, False):
            with pytest.raises(DamagedIndexError, match=r"faiss.* changed since"):
                open_index(tmp_path / "i", verify=verify).search(queries, 3)
        path.write_bytes(content)
    assert len(list((tmp_path / "i").rglob("*.faiss"))) == 2
    assert open_index(tmp_path / "i").parameters == index.parameters == {"factory": "HNSW8,Flat", "bits": 8}


def test_the_engine_is_chosen_by_size_where_none_is_named(tmp_path: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build_index(corpus(0, 30), word_sum, tmp_path / "small").kind == "exact-dense"
    monkeypatch.setattr(building, "engine_name", lambda name, card, documents: "pq-dense" if documents else "exact-dense")
    assert build_index(corpus(0, 30), word_sum, tmp_path / "large").kind == "pq-dense"


def test_invalid_settings_are_refused_before_encoding(tmp_path: Path, word_sum: Any) -> None:
    for engine, settings in (("faiss-dense", {"factory": "Nonsense"}), ("pq-dense", {"bits": 4})):
        with pytest.raises(InputError):
            build_index(corpus(0, 30), word_sum, tmp_path / "i", options=BuildOptions(engine=engine, settings=settings))
    assert word_sum.calls == []
    assert list(tmp_path.iterdir()) == []
