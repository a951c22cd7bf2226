"""An index over several segments, with deleted documents and filters: always what one search over the living documents finds."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    BuildOptions,
    Filter,
    IndexReader,
    add_documents,
    build_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
)
from quiver.retrieval.records import Document, Hits, Query
from quiver.retrieval.search.retrievers import IndexSearcher

DOCUMENTS = [
    Document(
        f"d{number:03d}",
        f"word{number % 9} text{number % 4} " + "tail " * (number % 3),
        metadata={"year": 2000 + number % 10, "part": number},
    )
    for number in range(60)
]
QUERIES = ["word3 text1", "tail", "text2 word8 tail", "nothing"]


@pytest.fixture(params=["dense", "colbert"])
def model(request: pytest.FixtureRequest, word_sum: Any, word_by_word: Any) -> Any:
    return word_sum if request.param == "dense" else word_by_word


@pytest.fixture
def changed(tmp_path: Path, model: Any) -> tuple[IndexReader, list[Document]]:
    """An index of three segments, some documents of which are deleted or replaced, and what is alive of it."""
    build_index(DOCUMENTS[:30], model, tmp_path / "i")
    add_documents(tmp_path / "i", DOCUMENTS[30:50], model)
    gone = {document.id for document in DOCUMENTS[10:50:3]}
    delete_documents(tmp_path / "i", sorted(gone))
    index = add_documents(tmp_path / "i", DOCUMENTS[40:], model, replace_existing=True)
    return index, [document for document in DOCUMENTS[:40] if document.id not in gone] + DOCUMENTS[40:]


def same(found: Hits, wanted: Hits) -> None:
    assert [list(ids) for ids in found.ids] == [list(ids) for ids in wanted.ids]
    for mine, theirs in zip(found.scores, wanted.scores, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def brute_force(model: Any, documents: Sequence[Document], k: int) -> Hits:
    queries = model.encode_texts(QUERIES, "query").vectors
    if not documents:
        return Hits([[]] * len(QUERIES), [np.zeros(0, np.float32)] * len(QUERIES))
    return build_index(documents, model, options=BuildOptions("exact")).search(queries, k)


def test_python_reads_conditions_as_the_command_line_does(changed: tuple[IndexReader, list[Document]], model: Any) -> None:
    index, alive = changed
    queries = model.encode_texts(QUERIES, "query").vectors
    for filter, years in (
        ("year>2004", range(2005, 2010)),
        (["year > 2004", "year != 2007"], (2005, 2006, 2008, 2009)),
        (("year==2005",), [2005]),
    ):
        wanted = [document for document in alive if (document.metadata or {})["year"] in years]
        same(index.search(queries, 9, filter=filter), brute_force(model, wanted, 9))
        conditions = [filter] if isinstance(filter, str) else filter
        same(index.search(queries, 9, filter=Filter.parse(conditions)), brute_force(model, wanted, 9))
    assert Filter.parse("year>2004") == Filter.parse(["year>2004"])
    found = IndexSearcher(index, model).search([Query("q", "word3 text1")], 60, filter="year=2003").ids[0]
    assert set(found) == {document.id for document in alive if (document.metadata or {})["year"] == 2003}
    either = [document for document in alive if (document.metadata or {})["year"] in (2003, 2004)]
    same(index.search(queries, 9, filter="year=2003 or year=2004"), brute_force(model, either, 9))
    with pytest.raises(InputError, match="no document has the field 'yaer'"):
        IndexSearcher(index, model).search([Query("q", "tail")], 9, filter="yaer=2003")
    for wrong in (5, {"year": 2003}, ["year=2003", 5]):
        with pytest.raises(InputError, match="filter must be a Filter, a condition such as"):
            index.search(queries, 9, filter=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [np.int64(5), np.uint8(5), np.int32(5)])
def test_the_number_of_hits_may_be_any_integer(changed: tuple[IndexReader, list[Document]], model: Any, k: Any) -> None:
    index, alive = changed
    queries = model.encode_texts(QUERIES, "query").vectors
    same(index.search(queries, k), index.search(queries, 5))
    same(build_index(alive, model, options=BuildOptions("exact")).search(queries, k), brute_force(model, alive, 5))
    assert len(IndexSearcher(index, model).search([Query("q", "tail")], k).ids[0]) == 5
    with pytest.raises(TypeError):
        index.search(queries, 5.0)  # type: ignore[arg-type]


def test_python_documents_follow_the_rules_of_files(tmp_path: Path, word_sum: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"_id": 1, "text": "a", "year": 2001, "venue": {"name": "ACL", "rank": 1}, "authors": [{"name": "A"}, {"name": "B"}], "doi": None},
        {"_id": 2, "text": "b", "tags": ["x", None, ["y"]], "score": float("nan"), "empty": [], "nothing": {"at": {"all": None}}},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [Document(row["_id"], row["text"], metadata={k: v for k, v in row.items() if k not in ("_id", "text")}) for row in rows]
    from_file = build_index(tmp_path / "corpus.jsonl", word_sum, tmp_path / "file")
    for name, documents in (("list", given), ("stream", iter(given))):
        from_python = build_index(documents, word_sum, tmp_path / name)
        assert list(from_python.documents) == list(from_file.documents)
        assert from_python.fields == from_file.fields
    assert from_file.documents[0].metadata == {"year": 2001, "venue.name": "ACL", "venue.rank": 1, "authors.name": ["A", "B"]}
    assert from_file.documents[1].metadata == {"tags": ["x", "y"], "empty": []}
    numbers = Document("3", "c", metadata={"n": np.int64(3), "x": np.float32(0.5), "ok": np.bool_(True)})  # type: ignore[dict-item]
    assert add_documents(tmp_path / "file", [numbers], word_sum).document("3").metadata == {"n": 3, "x": 0.5, "ok": True}


def test_an_integer_id_is_its_digits(tmp_path: Path, word_sum: Any) -> None:
    documents = [Document(number, f"word{number}") for number in (7, np.int64(8), "9")]  # type: ignore[arg-type]
    index = build_index(documents, word_sum, tmp_path / "i")
    assert list(index.ids) == ["7", "8", "9"]
    assert index.document(8).text == "word8"  # type: ignore[arg-type]
    assert list(delete_documents(tmp_path / "i", [7, "8"]).ids) == ["9"]  # type: ignore[list-item]
    assert list(build_index(documents, word_sum).ids) == ["7", "8", "9"]
    with pytest.raises(InputError, match="document id '9' occurs twice"):
        build_index([Document("9", "a"), Document(9, "b")], word_sum, tmp_path / "j")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (Document(1.5, "x"), "the id of a document must be a string or an integer, got 1.5"),  # type: ignore[arg-type]
        (Document(None, "x"), "the id of a document must be a string or an integer, got None"),  # type: ignore[arg-type]
        (Document(True, "x"), "the id of a document must be a string or an integer, got True"),
        (Document(" ", "x"), "the id of a document is blank"),
        (Document("d", "x", metadata={"a": float("inf")}), "document 'd': metadata field 'a' must hold strings, finite numbers"),
        (Document("d", "x", metadata={"a": {"b": {1}}}), "document 'd': metadata field 'a.b' must hold strings"),  # type: ignore[dict-item]
        (Document("d", "x", metadata={"a": {"b": 1}, "a.b": 2}), "document 'd': two metadata fields have the name 'a.b'"),  # type: ignore[dict-item]
        (Document("d", "x", metadata=["a"]), "document 'd': the metadata must be a mapping from field to value"),  # type: ignore[arg-type]
        (Document("d", "x", metadata={1: "a"}), "document 'd': names of metadata fields must be strings, got 1"),  # type: ignore[dict-item]
    ],
)
def test_a_document_that_no_index_can_hold_is_named(tmp_path: Path, word_sum: Any, document: Document, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_index([Document("c", "y"), document], word_sum, tmp_path / "i")


def test_a_field_to_filter_by_must_be_in_a_document(tmp_path: Path, word_sum: Any) -> None:
    documents = [Document("c", "y", metadata={"a": 1}), Document("d", "x")]
    with pytest.raises(InputError, match="no document has the field 'b' to filter by; the documents have a"):
        build_index(iter(documents), word_sum, tmp_path / "i", options=BuildOptions(fields=["a", "b"]))
    assert word_sum.calls == []  # before anything was encoded
    with pytest.raises(InputError, match="no document has the field 'b' to filter by; they have none"):
        build_index(documents[1:], word_sum, tmp_path / "i", options=BuildOptions(fields=["b"]))
    assert list(build_index(documents, word_sum, tmp_path / "i", options=BuildOptions(fields=["a"])).fields) == ["a"]


def test_queries_that_cannot_be_searched(changed: tuple[IndexReader, list[Document]], model: Any) -> None:
    index, _ = changed
    dense = index.manifest.model.kind == "dense"
    with pytest.raises(ValueError, match="k must be >= 1"):
        index.search(model.encode_texts(QUERIES, "query").vectors, 0)
    wrong: Any = np.ones((2, 5), np.float32)
    with pytest.raises(ValueError, match="must have the shape"):
        index.search(wrong if dense else [wrong], 3)
    broken: Any = np.full((1, 256), np.nan, np.float32)
    with pytest.raises(ValueError, match="of query 0 is not finite"):
        index.search(broken if dense else [broken], 3)
    assert len(index.search(broken[:0] if dense else [], 3)) == 0


def test_scores_of_chosen_documents(changed: tuple[IndexReader, list[Document]], model: Any) -> None:
    index, alive = changed
    queries = model.encode_texts(QUERIES, "query").vectors
    hits = index.search(queries, len(alive))
    for query, ids, scores in zip(queries, hits.ids, hits.scores, strict=True):
        np.testing.assert_allclose(index.scores(query, ids[::-1]), scores[::-1], rtol=1e-5, atol=1e-5)
    assert index.locate(["d010", alive[0].id, alive[-1].id]) == [None, (0, 0), (2, 19)]
    with pytest.raises(InputError, match="has no document 'd010'"):
        index.scores(queries[0], ["d010"])


def test_a_compacted_index_equals_a_new_build(changed: tuple[IndexReader, list[Document]], model: Any, tmp_path: Path) -> None:
    index, alive = changed
    queries = model.encode_texts(QUERIES, "query").vectors
    found, compacted, built = index.search(queries, 20), compact_index(tmp_path / "i"), build_index(alive, model, tmp_path / "new")
    assert len(index.segments) == 3
    same(found, brute_force(model, alive, 20))
    assert [segment.files for segment in compacted.manifest.segments] == [segment.files for segment in built.manifest.segments]
    assert compact_index(tmp_path / "i").manifest.generation == compacted.manifest.generation  # nothing to do, nothing committed
    delete_documents(tmp_path / "i", [alive[0].id])
    delete_documents(tmp_path / "i", [alive[1].id])
    same(index.search(queries, 20), found)  # the files of an opened index stay readable when they are removed
    assert list(index.documents) == alive


def test_compaction_with_a_small_memory_limit_keeps_several_segments(changed: tuple[IndexReader, list[Document]], tmp_path: Path) -> None:
    _, alive = changed
    compacted = compact_index(tmp_path / "i", memory=1)
    assert len(compacted.manifest.segments) == 3
    assert [segment.deleted for segment in compacted.manifest.segments] == [None] * 3
    assert list(compacted.documents) == alive


def test_single_additions_are_merged_and_the_large_segment_is_not_written_again(tmp_path: Path, model: Any) -> None:
    first = [Document(f"f{number:04d}", f"word{number} text") for number in range(1200)]
    more = [Document(f"n{number:02d}", f"word{number} new") for number in range(27)]
    before = build_index(first, model, tmp_path / "i", options=BuildOptions(engine="exact"))
    query = model.encode_texts(["word3 text", "word26 new"], "query").vectors
    found = before.search(query, 20)
    (base,) = before.manifest.segments
    counts, written, names = [], 0, {base.name}
    for number, document in enumerate(more):
        index = add_documents(tmp_path / "i", [document], model)
        segments = index.manifest.segments
        assert (segments[0], index.manifest.generation, index.manifest.operation) == (base, number + 2, "add")
        assert segments[0].documents == 1200
        assert (len(index), sum(segment.documents for segment in segments)) == (1201 + number, 1201 + number)
        counts.append(len(segments))
        written += sum(segment.documents for segment in segments if segment.name not in names)
        names |= {segment.name for segment in segments}
    assert max(counts) <= 4
    assert written <= 27 * 8  # documents: far from 27 times the index
    index = open_index(tmp_path / "i")
    assert list(index.documents) == [*first, *more]
    whole = build_index([*first, *more], model, tmp_path / "new", options=BuildOptions(engine="exact"))
    same(index.search(query, 20), whole.search(query, 20))
    same(before.search(query, 20), found)  # what was open has its files, although the folder has lost them
    assert check_index(tmp_path / "i").problems == ()


def test_an_addition_is_not_merged_with_a_damaged_segment(tmp_path: Path, model: Any) -> None:
    build_index(DOCUMENTS[:20], model, tmp_path / "i")
    for place in (20, 30):
        add_documents(tmp_path / "i", DOCUMENTS[place : place + 10], model)
    damaged = next((tmp_path / "i" / "segments").glob("s-000000000002-0000/texts.arrow"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-9] + b"x" + whole[-8:])
    index = add_documents(tmp_path / "i", DOCUMENTS[40:50], model)
    assert [segment.documents for segment in index.manifest.segments] == [20, 10, 20]
    assert damaged.read_bytes() != whole
    damaged.write_bytes(whole)
    assert list(open_index(tmp_path / "i").documents) == DOCUMENTS[:50]


def test_documents_that_were_read_are_not_kept_in_memory(tmp_path: Path, word_sum: Any) -> None:
    build_index(
        [Document(f"d{number}", f"word{number % 9} " + "x" * 1000, "", {"n": number}) for number in range(3000)], word_sum, tmp_path
    )
    index = open_index(tmp_path)
    query = word_sum.encode_texts(["word3"], "query").vectors
    assert len(index.search(query, 10, filter="n>=0").ids[0]) == len([index.document(f"d{number}") for number in range(10)])
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    try:
        characters = sum(len(document.text) for document in index.documents) + sum(len(index.text_of(key)) for key in index.ids)
        index.search(query, 10, filter="n>=0")
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert characters > 6_000_000
    assert kept + pa.total_allocated_bytes() - before < 200_000


def test_deleting_an_unknown_document_deletes_nothing(tmp_path: Path, model: Any) -> None:
    build_index([*DOCUMENTS[:4], DOCUMENTS[4]._replace(id="notes.md#1")], model, tmp_path / "i")
    with pytest.raises(InputError, match=r"nothing was deleted; its passages are notes\.md#1 and so on, and quiver index refresh drops"):
        delete_documents(tmp_path / "i", ["notes.md"])
    with pytest.raises(InputError, match=r"document 'x' is not in this index \(nor are 1 others\); nothing was deleted"):
        delete_documents(tmp_path / "i", ["d001", "x", "y"])
    assert len(open_index(tmp_path / "i")) == 5
    assert delete_documents(tmp_path / "i", []).manifest.generation == 1
    assert len(delete_documents(tmp_path / "i", ["d001", "d001"])) == 4
    assert len(delete_documents(tmp_path / "i", ["d002"])) == 3  # tombstones on tombstones
    assert check_index(tmp_path / "i").problems == ()


def test_sizes_are_those_of_the_searched_data(tmp_path: Path, word_sum: Any) -> None:
    index = build_index(DOCUMENTS, word_sum, tmp_path / "i", options=BuildOptions(store_text=False))
    assert index.nbytes == 60 * 256 * 4
