"""BM25 over an open index: equal to BM25 over the documents that are not deleted, with and without a cache."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import BuildOptions, Filter, IndexReader, add_documents, build_index, compact_index, delete_documents
from quiver.retrieval.index.words import BlockLimits, rank_streamed
from quiver.retrieval.models.bm25 import BM25
from quiver.retrieval.records import Document, Hits
from quiver.retrieval.search.bm25 import word_index, word_scores

QUERIES = ["rare7 common", "word3 text1 word3", "the of", "unknown", "tail title2", "\u00fcber \u6f22\u5b57"]


def document(number: int) -> Document:
    words = f"word{number % 9} text{number % 4} " + "tail " * (number % 3) + ("common " if number % 5 else "\u00fcber \u6f22\u5b57 ")
    return Document(f"d{number:03d}", words + f"rare{number}" * (number % 2), f"title{number % 6}", {"part": number})


DOCUMENTS = [*map(document, range(60)), Document("e1", ""), Document("e2", "the of a")]


@pytest.fixture
def changed(tmp_path: Path, word_sum: Any) -> tuple[IndexReader, list[Document]]:
    """An index of three segments, some documents of which are deleted or replaced, and what is alive of it."""
    build_index(DOCUMENTS[:30], word_sum, tmp_path / "i")
    add_documents(tmp_path / "i", DOCUMENTS[30:50], word_sum)
    gone = {each.id for each in DOCUMENTS[10:50:3]}
    delete_documents(tmp_path / "i", sorted(gone))
    index = add_documents(tmp_path / "i", DOCUMENTS[40:], word_sum, replace_existing=True)
    return index, [each for each in DOCUMENTS[:40] if each.id not in gone] + DOCUMENTS[40:]


def over(documents: Iterable[Document], k: int) -> Hits:
    return rank_streamed(lambda: ((each.id, each.content()) for each in documents), QUERIES, k)


def same(found: Hits, wanted: Hits) -> None:
    assert [list(ids) for ids in found.ids] == [list(ids) for ids in wanted.ids]
    for mine, theirs in zip(found.scores, wanted.scores, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("block", [7, 100_000])
def test_bm25_sees_all_segments_without_deleted_documents(
    changed: tuple[IndexReader, list[Document]], tmp_path: Path, cached: bool, block: int
) -> None:
    index, alive = changed
    assert len(index.segments) == 3
    words = word_index(index, cache=tmp_path / "words" if cached else None, limits=BlockLimits(block))
    assert len(words) == len(alive)
    for k in (1, 5, 1000):
        same(words.search(QUERIES, k), over(alive, k))
    everything = words.search(QUERIES, 1000)
    assert [len(ids) for ids in everything.ids[2:4]] == [0, 0]  # stop words and words that nobody has
    for query, ids, scores in zip(QUERIES, everything.ids, everything.scores, strict=True):
        for key, score in list(zip(ids, scores.tolist(), strict=True))[:3]:
            parts = word_scores(words, query, key)
            assert sum(part.score for part in parts) == pytest.approx(score, rel=1e-6)
            assert [part.word for part in parts] == query.split()
    assert [part.score for part in word_scores(words, "unknown", "d000")] == [0.0]
    with pytest.raises(InputError, match="the index has no document 'd010'"):
        word_scores(words, "word3", "d010")
    with pytest.raises(ValueError, match="k must be >= 1"):
        words.search(QUERIES, 0)


def test_filters_do_not_change_document_frequencies(changed: tuple[IndexReader, list[Document]]) -> None:
    index, alive = changed
    words = word_index(index)
    found = words.search(QUERIES, 1000, filter=Filter.parse(["part>=20", "part<45"], ids=[each.id for each in alive[::2]]))
    allowed = {each.id for each in alive[::2] if each.metadata and 20 <= int(str(each.metadata["part"])) < 45}
    whole = over(alive, 1000)
    assert sum(map(len, found.ids)) > 10
    for ids, scores, every, wanted in zip(found.ids, found.scores, whole.ids, whole.scores, strict=True):
        expected = [(key, score) for key, score in zip(every, wanted.tolist(), strict=True) if key in allowed]
        assert list(zip(ids, scores.tolist(), strict=True)) == expected
    with pytest.raises(InputError, match="no document has the field 'color'"):
        words.search(QUERIES, 3, filter=Filter.parse(["color = 'red'"]))


def counted(cache: Path) -> dict[str, tuple[int, int]]:
    """Folder of a segment's words -> its documents, and when they were counted."""
    files = {path.parent.name: path for path in cache.glob("*/words.json")}
    return {name: (sum(json.loads(path.read_text())["blocks"]), path.stat().st_mtime_ns) for name, path in files.items()}


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "list"])
def test_damaged_word_tables_are_counted_again(
    changed: tuple[IndexReader, list[Document]], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    index, alive = changed
    cache = tmp_path / "words"
    word_index(index, cache=cache)
    for folder in cache.iterdir():
        file = folder / "0000.counts"
        if damage == "missing":
            file.unlink()
        elif damage == "cut":
            file.write_bytes(file.read_bytes()[:-4])
        elif damage == "changed":
            file.write_bytes(bytes(len(file.read_bytes())))
        else:
            (folder / "words.json").write_text('{"blocks": 1}')
    with caplog.at_level(logging.WARNING, logger="quiver.retrieval"):
        same(word_index(index, cache=cache).search(QUERIES, 10), over(alive, 10))
    assert sum("counting the words again" in record.message for record in caplog.records) == 3
    caplog.clear()
    word_index(index, cache=cache)
    assert not caplog.records
    assert len(list(cache.iterdir())) == 3  # and nothing is left beside them


def test_words_are_counted_once_with_titles_and_once_without(tmp_path: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "words"
    for use_title, number in ((True, 10), (False, 0)):
        index = build_index(DOCUMENTS, word_sum, tmp_path / f"{use_title}", options=BuildOptions(use_title=use_title))
        assert len(word_index(index, cache=cache).search(["title2"], 100).ids[0]) == number
        with monkeypatch.context() as patched:
            patched.setattr("quiver.retrieval.search.bm25.split_words", None)
            assert len(word_index(index, cache=cache, verify=False)) == len(word_index(index, cache=cache)) == len(index)


def test_bm25_without_texts_is_refused(tmp_path: Path, word_sum: Any) -> None:
    bare = build_index(DOCUMENTS, word_sum, tmp_path / "bare", options=BuildOptions(store_text=False))
    with pytest.raises(InputError, match="built without texts, which BM25 needs"):
        word_index(bare)


@pytest.mark.parametrize("fault", ["no folder", "full disk", "full disk, as a writer reports it"])
def test_word_tables_stay_in_memory_where_the_cache_cannot_be_written(
    changed: tuple[IndexReader, list[Document]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    index, alive = changed
    cache = tmp_path / "words"
    if fault == "no folder":
        cache.write_text("")  # also the root user can make no folder of a file
    else:

        def fail(*arguments: object) -> None:
            full = OSError(errno.ENOSPC, "No space left on device")
            if fault == "full disk":
                raise full
            raise InputError("cannot be written") from full

        monkeypatch.setattr("quiver.retrieval.index.words.WordTable.save", fail)  # behind a pass over the texts
    for _ in range(2):
        same(word_index(index, cache=cache, limits=BlockLimits(7)).search(QUERIES, 10), over(alive, 10))
    (line,) = [record.getMessage() for record in caplog.records if "cannot be written" in record.getMessage()]
    assert line.startswith(f"{cache}: cannot be written (")
    assert "QUIVER_CACHE" in line
    assert not list(tmp_path.glob("words/*"))


@pytest.fixture
def built(tmp_path: Path) -> tuple[IndexReader, list[Document]]:
    """An index of BM25 with several segments, some documents of which are deleted or replaced, and what is alive of it."""
    build_index(DOCUMENTS[:30], "bm25", tmp_path / "i")
    add_documents(tmp_path / "i", DOCUMENTS[30:50], BM25())
    gone = {each.id for each in DOCUMENTS[10:50:3]}
    delete_documents(tmp_path / "i", sorted(gone))
    index = add_documents(tmp_path / "i", DOCUMENTS[40:], BM25(), replace_existing=True)
    assert len(index.segments) == 3
    return index, [each for each in DOCUMENTS[:40] if each.id not in gone] + DOCUMENTS[40:]


def of_bm25s(documents: list[Document]) -> dict[str, dict[str, float]]:
    """The scores that bm25s itself gives: query -> document -> score."""
    words = bm25s.tokenize([each.content() for each in documents], stopwords="english", show_progress=False)
    ranker = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    ranker.index(words, show_progress=False)
    found = {}
    for query in QUERIES:
        (tokens,) = bm25s.tokenize([query], stopwords="english", return_ids=False, show_progress=False)
        known = [token for token in tokens if token in words.vocab]
        scores = ranker.get_scores(known) if known else np.zeros(len(documents), np.float32)
        found[query] = {each.id: float(score) for each, score in zip(documents, scores, strict=True) if score > 0}
    return found


@pytest.mark.parametrize("compacted", [False, True])
def test_an_index_of_bm25_gives_the_scores_of_bm25s_over_its_living_documents(
    built: tuple[IndexReader, list[Document]], compacted: bool
) -> None:
    index, alive = built
    if compacted:
        index = compact_index(index.path)
        assert len(index.segments) == 1
    wanted = of_bm25s(alive)
    assert sum(map(len, wanted.values())) > 60
    for query in QUERIES:
        hits = index.search(query, 1000)
        assert {hit.id: hit.score for hit in hits} == wanted[query]
        assert [(hit.score, hit.id) for hit in hits] == sorted(((hit.score, hit.id) for hit in hits), reverse=True)
    for k in (1, 5, 1000):
        same(index.search(QUERIES, k), over(alive, k))
    assert word_index(index) is index


def test_searching_words_imports_no_torch(built: tuple[IndexReader, list[Document]]) -> None:
    command = "import sys; from quiver.cli.main import app; app(sys.argv[1:], standalone_mode=False); print('torch' in sys.modules)"
    words = [sys.executable, "-c", command, "search", str(built[0].path), "word3", "--explain"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"


def test_what_bm25_cannot_do_is_refused_in_one_line(built: tuple[IndexReader, list[Document]], tmp_path: Path) -> None:
    index, _ = built
    with pytest.raises(InputError, match="this bm25 index has no search parameter 'nprobe'"):
        index.search("word3", 3, effort={"nprobe": 3})
    with pytest.raises(InputError, match="index engine 'pq-dense' does not exist for a bm25 model; choose one of bm25"):
        build_index(DOCUMENTS, "bm25", tmp_path / "x", options=BuildOptions(engine="pq-dense"))
    with pytest.raises(InputError, match="none of the documents has a word"):
        build_index([Document("a", "the of"), Document("b", "?")], "bm25", tmp_path / "x")
