"""The search contract of every engine, at the edges: few documents, none, equal ones, empty ones, deleted ones.

Whatever an engine looks at, a hit is a document that may be found, each at most once, with the score that the engine itself gives it;
where it looks at everything, the hits are those of brute force with these scores.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import Filter, IndexReader, add_documents, compact_index, delete_documents, open_index
from quiver.retrieval.records import Document

ENGINES = ["exact-dense", "pq-dense", "ivf-dense", "faiss-dense", "exact-tokens", "ivf-tokens", "bm25"]


def test_these_are_all_engines(faults: ModuleType) -> None:
    from quiver.retrieval.index.engines import ENGINE_MODULES as TABLE

    assert set(ENGINES) == set(faults.ENGINES) == set(TABLE)


def mixed(count: int) -> list[Document]:
    """Documents of one to five words; every seventh is empty, and has no vector where there is one a token."""
    rng = np.random.default_rng(count)
    texts = [" ".join(f"w{word}" for word in rng.integers(0, 30, rng.integers(1, 6))) for _ in range(count)]
    return [
        Document(f"d{number:03d}", "" if number % 7 == 6 else text, "", {"n": number, "even": number % 2 == 0})
        for number, text in enumerate(texts)
    ]


WHERE = {
    "all": None,
    "half": Filter.parse(["even"]),
    "few": Filter.parse(["n IN (1, 4, 9)"]),
    "one": Filter(ids=frozenset(["d002"])),
    "none of it": Filter(ids=frozenset(["nobody"])),
    "none at all": Filter(ids=frozenset()),
}


def findable(index: IndexReader, filter: Filter | None) -> list[str]:
    """The ids of the documents that have a vector and may be found."""
    found: list[str] = []
    bitmaps = index.matching(filter) if filter is not None else tuple(segment.alive for segment in index.segments)
    for segment, allowed in zip(index.segments, bitmaps, strict=True):
        may = segment.vectors.lengths > 0
        rows = np.flatnonzero(may if allowed is None else may & allowed)
        found += segment.documents.ids.strings.take(rows)
    return found


def check(index: IndexReader, faults: ModuleType, texts: list[str], *, filters: dict[str, Filter | None] = WHERE) -> int:
    """Search in many ways; how many hits were looked at."""
    kind = faults.ENGINES[index.kind]
    queries, seen = faults.encoded(kind.model, texts), 0
    for filter in filters.values():
        ids = sorted(findable(index, filter), reverse=True)
        for k in (1, 3, 1000):
            for effort in ("exact", "balanced", "fast", kind.narrow):
                hits = index.search(queries, k, filter=filter, effort=effort)
                for query, found, scores in zip(queries, hits.ids, hits.scores, strict=True):
                    may = ids
                    if index.kind == "bm25":  # finds only documents that share a word with the query
                        may = [key for key, score in zip(ids, index.scores(query, ids), strict=True) if score > 0]
                    assert len(found) == len(set(found)) == len(scores) == min(k, len(may))
                    assert set(found) <= set(may)
                    assert np.isfinite(scores).all()
                    np.testing.assert_array_equal(scores, index.scores(query, found))
                    assert [*zip(scores, found, strict=True)] == sorted(zip(scores, found, strict=True), reverse=True)
                    if effort == "exact":
                        best = sorted(zip(index.scores(query, may).tolist(), may, strict=True), reverse=True)[:k]
                        assert found == [key for _, key in best]
                    seen += len(found)
    return seen


QUERIES = ["w1", "w3 w4 w29", "w7 other", " ".join(f"w{number}" for number in range(20))]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mixed_collection_in_several_segments(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    documents, model = mixed(90), faults.ENGINES[engine].model
    faults.build(tmp_path / "i", engine, documents[:60])
    add_documents(tmp_path / "i", documents[60:], model, disk=faults.FAST)
    assert check(open_index(tmp_path / "i"), faults, QUERIES) > 500
    delete_documents(tmp_path / "i", [f"d{number:03d}" for number in range(0, 90, 3)], disk=faults.FAST)
    assert check(open_index(tmp_path / "i"), faults, QUERIES[:2]) > 50


@pytest.mark.parametrize("engine", ENGINES)
def test_single_additions_merge_and_find_the_same_as_a_compacted_index(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    documents, kind = mixed(72), faults.ENGINES[engine]
    faults.build(tmp_path / "i", engine, documents[:60])
    delete_documents(tmp_path / "i", ["d004"], disk=faults.FAST)
    for number in range(60, 72):
        again = [documents[number - 8]] if number % 4 == 0 else []
        index = add_documents(tmp_path / "i", [*again, documents[number]], kind.model, replace_existing=True, disk=faults.FAST)
        assert len(index.manifest.segments) <= 4
    order = [each.id for each in index.documents]
    assert sorted(order) == sorted(each.id for each in documents if each.id != "d004")
    assert order[-4:] == ["d060", "d068", "d069", "d070", "d071"][-4:]
    assert check(index, faults, QUERIES) > 500
    queries = faults.encoded(kind.model, QUERIES)
    found = index.search(queries, 20, effort="exact")
    whole = compact_index(tmp_path / "i", disk=faults.FAST)
    assert [each.id for each in whole.documents] == order
    wanted = whole.search(queries, 20, effort="exact")
    assert found.ids == wanted.ids
    for mine, theirs in zip(found.scores, wanted.scores, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_document(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    one = [Document("d002", "w1 w2")]
    if engine == "faiss-dense":  # what the factory string asks for cannot be learned from one vector
        with pytest.raises(InputError, match="FAISS cannot train it on 1 vectors"):
            faults.build(tmp_path / "lists", engine, one)
        faults.build(tmp_path / "i", engine, one, settings={"factory": "IVF1,Flat"})
    else:
        faults.build(tmp_path / "i", engine, one)
    index = open_index(tmp_path / "i")
    only = {name: WHERE[name] for name in ("all", "one", "none of it", "none at all")}
    assert check(index, faults, ["w1", "other"], filters=only) == 2 * 2 * 3 * 4 // (
        1 + (engine == "bm25")
    )  # by words, "other" finds nothing


@pytest.mark.parametrize("engine", ENGINES)
def test_one_text_again_and_again_is_found_by_the_greatest_ids(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    order = np.random.default_rng(0).permutation(60).tolist()
    copies = [Document(f"d{number:03d}", "w1 w2 w3", "", {"n": number, "even": number % 2 == 0}) for number in order]
    faults.build(tmp_path / "i", engine, copies[:40])
    index = add_documents(tmp_path / "i", copies[40:], faults.ENGINES[engine].model, disk=faults.FAST)
    assert check(index, faults, ["w1", "w2 w9"]) > 500
    kind = faults.ENGINES[engine]
    for effort in ("exact", "balanced", "fast", kind.narrow):
        found = index.search(faults.encoded(kind.model, ["w1"]), 5, effort=effort).ids[0]
        assert found == ["d059", "d058", "d057", "d056", "d055"]


@pytest.mark.parametrize("engine", ENGINES)
def test_everything_deleted_compacted_and_added_to(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    documents, kind = mixed(20), faults.ENGINES[engine]
    faults.build(tmp_path / "i", engine, documents)
    query = faults.encoded(kind.model, ["w1", "w2 w3"])
    for change in (
        lambda: delete_documents(tmp_path / "i", [document.id for document in documents], disk=faults.FAST),
        lambda: compact_index(tmp_path / "i", disk=faults.FAST),
    ):
        index = change()
        assert len(index) == len(index.ids) == len(index.documents) == 0
        for effort in ("exact", "balanced", kind.narrow):
            hits = index.search(query, 3, effort=effort)
            assert list(map(list, hits.ids)) == [[], []]
            assert [len(scores) for scores in hits.scores] == [0, 0]
    assert index.segments == ()
    again: Any = add_documents(tmp_path / "i", documents, kind.model, disk=faults.FAST)
    assert check(again, faults, QUERIES[:2]) > 50
