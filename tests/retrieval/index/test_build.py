"""Building and adding: from a file or an iterable, checked first, streamed, resumed where it was killed."""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import BuildOptions, Filter, IndexReader, add_documents, build_index, delete_documents, exact, open_index
from quiver.retrieval.index.engines import AnyCodec, Engine, Sample, Setting
from quiver.retrieval.index.exact import ENGINES
from quiver.retrieval.index.pieces import PieceSizes
from quiver.retrieval.records import DenseEncoding, DenseModel, Document, ModelCard, TextTokens, TokenModel

SMALL = BuildOptions(pieces=PieceSizes(chunk_documents=4, documents=8))
"""Two chunks per piece."""

DOCUMENTS = [
    Document("a", "granite is hard", "Stone", {"year": 1999, "tags": ["rock", "hard"]}),
    Document("b", "a bird flies \u2028 high", "", {"year": 2005}),
    Document("c", "", ""),
    Document("é", "the sea\nis deep", "Sea", {"tags": ["water"]}),
]
MANY = [Document(f"d{number:02d}", f"word{number} text{number % 7}", "", {"part": number % 3}) for number in range(40)]


def write(path: Path) -> Path:
    rows = [
        json.dumps({"_id": each.id, "title": each.title, "text": each.text} | dict(each.metadata or {}), ensure_ascii=False)
        for each in DOCUMENTS
    ]
    content = "\n".join(rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def segment_bytes(index: IndexReader) -> list[dict[str, str]]:
    return [{name: entry.sha256 for name, entry in segment.files.items()} for segment in index.manifest.segments]


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_built_and_opened_it_finds_and_shows(tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel, kind: str) -> None:
    model = word_sum if kind == "dense" else word_by_word
    index = build_index(DOCUMENTS, model, tmp_path / "i")
    assert index.kind == ("exact-dense" if kind == "dense" else "exact-tokens")
    query = model.encode_texts(["a bird flies"], "query").vectors
    for each in (index, open_index(tmp_path / "i"), open_index(str(tmp_path / "i"), verify=False)):
        assert each.search(query, 2).ids[0][0] == "b"
        assert list(each.ids) == ["a", "b", "c", "é"]
        assert (len(each), each.ids[-1], each.ids[1:3]) == (4, "é", ["b", "c"])
        assert list(each.documents) == DOCUMENTS
        assert each.text_of("a") == "Stone granite is hard"
        assert dict(each.fields) == {"tags": "string[]", "year": "integer"}
        assert each.parameters == {"precision": "float32"}
        assert each.nbytes >= 4 * 256 * 4
    with pytest.raises(InputError, match="has no document 'zz'"):
        index.text_of("zz")


def test_file_gzip_folder_and_iterables_give_the_same_bytes(tmp_path: Path, word_sum: DenseModel) -> None:
    (tmp_path / "beir").mkdir()
    sources = [write(tmp_path / "c.jsonl"), write(tmp_path / "c.jsonl.gz"), write(tmp_path / "beir" / "corpus.jsonl").parent]
    built = [
        build_index(source, word_sum, tmp_path / f"i{number}")
        for number, source in enumerate([*sources, str(sources[0]), DOCUMENTS, iter(DOCUMENTS)])
    ]
    assert len({json.dumps(segment_bytes(index)) for index in built}) == 1
    assert all(not any((index.path / "tmp").iterdir()) for index in built)
    assert dict(built[0].document("a").metadata or {}) == {"year": 1999, "tags": ["rock", "hard"]}


@pytest.mark.parametrize("use_title", [True, False])
def test_the_title_is_encoded_and_shown_by_one_policy(tmp_path: Path, word_sum: Any, use_title: bool) -> None:
    index = build_index(DOCUMENTS, word_sum, tmp_path / "i", options=BuildOptions(use_title=use_title))
    shown = [index.text_of(key) for key in index.ids]
    assert word_sum.calls == [("document", shown)]
    assert shown[3] == ("Sea the sea\nis deep" if use_title else "the sea\nis deep")


def test_texts_and_fields_can_be_left_out(tmp_path: Path, word_sum: DenseModel) -> None:
    index = build_index(DOCUMENTS, word_sum, tmp_path / "i", options=BuildOptions(store_text=False, fields=["year"]))
    assert not any(name.startswith("texts") for name in index.manifest.segments[0].files)
    assert dict(index.fields) == {"year": "integer"}
    for show in (lambda: index.text_of("a"), lambda: index.documents):
        with pytest.raises(InputError, match="built without texts"):
            show()
    added = add_documents(tmp_path / "i", [Document("n", "new", "", {"year": 3, "other": 4})], word_sum)
    assert dict(added.fields) == {"year": "integer"}
    assert added.search(word_sum.encode_texts(["new"], "query").vectors, 9, filter=Filter.parse(["year<=3"])).ids == [["n"]]


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_the_bytes_do_not_depend_on_chunks_and_pieces(tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel, kind: str) -> None:
    model = word_sum if kind == "dense" else word_by_word
    whole = build_index(MANY, model, tmp_path / "whole")
    for number, (chunk, documents, size, characters) in enumerate([(5, 7, 9 << 10, 1 << 20), (2, 1000, 1 << 20, 1)]):
        sizes = PieceSizes(chunk_documents=chunk, documents=documents, vector_bytes=size, characters=characters)
        other = build_index(MANY, model, tmp_path / f"i{number}", options=BuildOptions(pieces=sizes))
        assert segment_bytes(other) == segment_bytes(whole)
        assert other.manifest.tokens == whole.manifest.tokens
        assert other.manifest.segments[0].vectors == whole.manifest.segments[0].vectors
        assert other.manifest.codec == whole.manifest.codec


def test_a_bad_last_line_is_found_before_anything_is_encoded(tmp_path: Path, word_sum: Any) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n')
    with pytest.raises(InputError, match=r"c\.jsonl:2: id 'a' is already used on line 1"):
        build_index(path, word_sum, tmp_path / "i")
    for documents in ([DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[0]], iter([DOCUMENTS[0], DOCUMENTS[0]])):
        with pytest.raises(InputError, match="'a' occurs twice"):
            build_index(documents, word_sum, tmp_path / "i")
    for documents in ([], iter([])):
        with pytest.raises(InputError, match="no documents to index"):
            build_index(documents, word_sum, tmp_path / "i")
    with pytest.raises(InputError, match="unknown index engine 'exactly'"):
        build_index(DOCUMENTS, word_sum, tmp_path / "i", options=BuildOptions(engine="exactly"))
    assert word_sum.calls == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.jsonl"]


def test_documents_without_a_vector_are_kept_and_never_found(tmp_path: Path, word_by_word: TokenModel) -> None:
    with pytest.raises(InputError, match="none of the documents has a vector"):
        build_index([Document("x", ""), Document("y", "")], word_by_word, tmp_path / "i")
    index = build_index(DOCUMENTS, word_by_word, tmp_path / "j")
    query = word_by_word.encode_texts(["sea"], "query").vectors
    assert sorted(index.search(query, 10).ids[0]) == ["a", "b", "é"]
    assert index.search(query, 10, filter=Filter(ids=frozenset(["c"]))).ids == [[]]
    assert build_index([DOCUMENTS[0]], word_by_word, tmp_path / "one").search(query, 10).ids == [["a"]]


def test_a_vector_that_is_not_finite_is_refused(tmp_path: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = TextTokens(np.ones(4, np.int32), np.zeros(4, bool), np.zeros(4, bool))
    broken = np.ones((4, 256), np.float32)
    broken[1] = np.nan
    monkeypatch.setattr(word_sum, "encode_texts", lambda texts, role, *, progress=False: DenseEncoding(broken, tokens))
    with pytest.raises(InputError, match="document 'b' is not finite"):
        build_index(DOCUMENTS, word_sum, tmp_path / "i")
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_refused_by_its_fingerprint(tmp_path: Path, word_sum: Any, other_word_sum: Any) -> None:
    index = build_index(DOCUMENTS, word_sum, tmp_path / "i")
    index.check_model(word_sum.card)
    for attempt in (lambda: index.check_model(other_word_sum.card), lambda: add_documents(tmp_path / "i", MANY, other_word_sum)):
        with pytest.raises(InputError, match=r"built with word-sum-a \(aaaaaaaaaaaa\), but the model given is word-sum-b \(bbbbbbbbbbbb\)"):
            attempt()
    assert other_word_sum.calls == []


class StopError(Exception):
    """Ends a build in the middle."""


def stopping(model: Any, calls: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The model fails after some calls; gives the texts that it has encoded."""
    encode, encoded = type(model).encode_texts, []
    left = calls

    def watched(texts: Any, role: str, *, progress: bool = False) -> Any:
        nonlocal left
        if left == 0:
            raise StopError
        left -= 1
        encoded.extend(texts)
        return encode(model, texts, role)

    monkeypatch.setattr(model, "encode_texts", watched)
    return encoded


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_an_interrupted_build_resumes(tmp_path: Path, word_sum: Any, word_by_word: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = word_sum if kind == "dense" else word_by_word
    whole = build_index(MANY, model, tmp_path / "whole")
    first = stopping(model, 5, monkeypatch)
    with pytest.raises(StopError):
        build_index(iter(MANY), model, tmp_path / "i", options=SMALL)
    assert len(first) == 20
    with pytest.raises(InputError, match="the build was never finished; run the same one again"):
        open_index(tmp_path / "i")
    with pytest.raises(InputError, match="the build was never finished"):
        add_documents(tmp_path / "i", MANY, model)
    again = stopping(model, 100, monkeypatch)
    index = build_index(MANY, model, tmp_path / "i", options=SMALL)
    assert again == [document.text for document in MANY[16:]]  # two pieces were finished
    assert segment_bytes(index) == segment_bytes(whole)
    assert not any((tmp_path / "i" / "tmp").iterdir())


def test_a_damaged_piece_is_made_again_and_another_build_goes_ahead_of_an_interrupted_one(
    tmp_path: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = build_index(MANY, word_sum, tmp_path / "whole")
    stopping(word_sum, 5, monkeypatch)
    with pytest.raises(StopError):
        build_index(MANY, word_sum, tmp_path / "i", options=SMALL)
    damaged = next((tmp_path / "i" / "tmp").glob("b-*/piece-000001/vectors.f32"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    again = stopping(word_sum, 100, monkeypatch)
    assert segment_bytes(build_index(MANY, word_sum, tmp_path / "i", options=SMALL)) == segment_bytes(whole)
    assert again == [document.text for document in MANY[8:]]
    stopping(word_sum, 5, monkeypatch)
    with pytest.raises(StopError):
        build_index(MANY[::-1], word_sum, tmp_path / "j", options=SMALL)
    stopping(word_sum, 100, monkeypatch)
    assert segment_bytes(build_index(MANY, word_sum, tmp_path / "j", options=SMALL)) == segment_bytes(whole)
    assert caplog.text.count("an earlier change with other data or options was not finished; repeat its command") == 1
    again = stopping(word_sum, 100, monkeypatch)
    turned = build_index(MANY[::-1], word_sum, tmp_path / "j", options=SMALL, overwrite=True)
    assert again == [document.text for document in MANY[:24][::-1]]  # two pieces had been finished
    assert list(turned.documents) == MANY[::-1]
    assert not any((tmp_path / "j" / "tmp").iterdir())


def interrupted_addition(folder: Path, model: Any, documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """An addition that has finished two pieces of eight documents."""
    stopping(model, 5, monkeypatch)
    with pytest.raises(StopError):
        add_documents(folder, documents, model, pieces=SMALL.pieces)


def test_an_interrupted_addition_is_checked_against_the_index_as_it_is_when_it_resumes(
    tmp_path: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    titled = [Document(document.id, document.text, "Title") for document in MANY]
    build_index(DOCUMENTS, word_sum, tmp_path / "i")
    interrupted_addition(tmp_path / "i", word_sum, titled, monkeypatch)
    again = stopping(word_sum, 100, monkeypatch)
    add_documents(tmp_path / "i", titled[7:8], word_sum)
    with pytest.raises(InputError, match="document 'd07' is in this index already"):
        add_documents(tmp_path / "i", titled, word_sum)
    assert len(add_documents(tmp_path / "i", titled, word_sum, replace_existing=True)) == 44
    assert len(again) == 1 + 24  # documents, of which 16 had been encoded
    # The same documents want other vectors where titles are not encoded: nothing of the interrupted addition may be taken.
    build_index(DOCUMENTS, word_sum, tmp_path / "j", options=SMALL)
    interrupted_addition(tmp_path / "j", word_sum, titled, monkeypatch)
    again = stopping(word_sum, 100, monkeypatch)
    build_index(DOCUMENTS, word_sum, tmp_path / "j", options=BuildOptions(use_title=False), overwrite=True)
    again.clear()
    index = add_documents(tmp_path / "j", titled, word_sum)
    assert again == [document.text for document in MANY]
    query = word_sum.encode_texts(["Title"], "query").vectors
    assert index.search(query, 1).scores[0][0] < 0.8  # a text with the word itself scores about 1


def test_unfinished_work_expires_after_a_week(
    tmp_path: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_index(DOCUMENTS, word_sum, tmp_path / "i")
    interrupted_addition(tmp_path / "i", word_sum, MANY, monkeypatch)
    again = stopping(word_sum, 100, monkeypatch)
    (work,) = (tmp_path / "i" / "tmp").iterdir()
    for days, stays in ((6, True), (8, False)):
        changed = time.time() - days * 86_400
        os.utime(work, (changed, changed))
        delete_documents(tmp_path / "i", ["b" if stays else "c"])
        assert work.is_dir() is stays
        assert ("removed unfinished work older than 7 days" in caplog.text) is not stays
    again.clear()
    assert len(add_documents(tmp_path / "i", MANY, word_sum)) == 42
    assert len(again) == 40


def test_an_existing_index_is_kept_unless_overwriting_is_asked_for(tmp_path: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build_index(MANY, word_sum, tmp_path / "i", options=SMALL)
    calls = len(word_sum.calls)
    with pytest.raises(InputError, match="an index exists already"):
        build_index(DOCUMENTS, word_sum, tmp_path / "i")
    assert len(word_sum.calls) == calls
    with monkeypatch.context() as patched:
        stopping(word_sum, 0, patched)
        with pytest.raises(StopError):
            build_index(DOCUMENTS, word_sum, tmp_path / "i", overwrite=True)
    assert list(open_index(tmp_path / "i").ids) == list(before.ids)
    after = build_index(DOCUMENTS, word_sum, tmp_path / "i", overwrite=True)
    assert (list(after.ids), after.manifest.generation) == (["a", "b", "c", "é"], 2)
    assert before.text_of("d07") == "word7 text0"  # what was open stays what it was
    assert before.search(word_sum.encode_texts(["word7"], "query").vectors, 1).ids == [["d07"]]
    assert [path.name for path in tmp_path.iterdir()] == ["i"]


EXACT_ENGINE = ENGINES["exact-tokens"]


class Trained:
    """An exact engine that wants a sample, and remembers what it got."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.samples: list[tuple[Sample, int, int, int, Mapping[str, Setting]]] = []

    def train(
        self, sample: Sample, card: ModelCard, *, documents: int, vectors: int, settings: Mapping[str, Setting], seed: int
    ) -> AnyCodec:
        self.samples.append((sample, documents, vectors, seed, dict(settings)))
        return EXACT_ENGINE.train(sample, card, documents=documents, vectors=vectors, settings={}, seed=seed)

    def open(self, folder: Path) -> AnyCodec:
        return EXACT_ENGINE.open(folder)


@pytest.mark.parametrize(("wanted", "chunk"), [(20, 4), (10_000, 4)])
def test_a_codec_is_trained_on_documents_chosen_at_random_which_are_encoded_once(
    tmp_path: Path, word_by_word: Any, wanted: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(wanted)
    monkeypatch.setitem(exact.ENGINES, "exact-tokens", Engine("colbert", trained.train, trained.open, lambda vectors: min(vectors, wanted)))
    sizes = PieceSizes(chunk_documents=chunk, documents=8, probe_documents=5, sample_documents=6)
    encoded = stopping(word_by_word, 1000, monkeypatch)
    documents = [Document(f"d{number:02d}", " ".join(["word"] * (number % 4)) + f" w{number}") for number in range(40)]
    index = build_index(documents, word_by_word, tmp_path / "i", options=BuildOptions(seed=3, settings={"bits": 4}, pieces=sizes))
    ((sample, count, vectors, seed, settings),) = trained.samples
    assert (count, seed, settings) == (40, 3, {"bits": 4})
    total = sum(len(document.text.split()) for document in documents)
    assert sample.lengths is not None
    assert sample.lengths.sum() == len(sample.vectors)
    if wanted == 20:
        assert 15 <= len(sample.vectors) <= 25
        assert abs(vectors - total) < 0.5 * total
        # The probe of five documents is encoded twice at most.
        assert len(encoded) <= 45
    else:
        assert (len(sample.vectors), vectors) == (total, total)
        assert len(encoded) == 45
    monkeypatch.undo()
    plain = build_index(documents, word_by_word, tmp_path / "plain")
    assert segment_bytes(index) == segment_bytes(plain)


def test_a_build_that_was_stopped_keeps_its_sample(tmp_path: Path, word_by_word: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(0)
    monkeypatch.setitem(exact.ENGINES, "exact-tokens", Engine("colbert", trained.train, trained.open, lambda vectors: min(vectors, 30)))
    sizes = PieceSizes(chunk_documents=4, documents=8, probe_documents=4, sample_documents=4)
    attempts = 0
    for attempts in range(1, 60):  # noqa: B007
        stopping(word_by_word, 2, monkeypatch)
        try:
            index = build_index(MANY, word_by_word, tmp_path / "i", options=BuildOptions(pieces=sizes))
            break
        except StopError:
            continue
    assert attempts > 5
    assert len(trained.samples) == 1
    monkeypatch.undo()
    assert segment_bytes(index) == segment_bytes(build_index(MANY, word_by_word, tmp_path / "plain"))


def test_documents_are_added_and_replaced(tmp_path: Path, word_sum: DenseModel) -> None:
    build_index(DOCUMENTS, word_sum, tmp_path / "i")
    with pytest.raises(InputError, match="document 'b' is in this index already"):
        add_documents(tmp_path / "i", [Document("n", "new"), Document("b", "again")], word_sum)
    assert open_index(tmp_path / "i").manifest.generation == 1
    index = add_documents(tmp_path / "i", [Document("n", "new"), Document("b", "again")], word_sum, replace_existing=True)
    assert list(index.ids) == ["a", "c", "é", "n", "b"]
    assert (index.manifest.documents, index.manifest.deleted, index.manifest.operation) == (5, 1, "add")
    assert index.text_of("b") == "again"
    assert index.search(word_sum.encode_texts(["a bird flies"], "query").vectors, 10).ids[0].count("b") == 1
    assert index.search(word_sum.encode_texts(["again"], "query").vectors, 1).ids == [["b"]]
    once_more = add_documents(tmp_path / "i", [Document("b", "third")], word_sum, replace_existing=True)
    assert once_more.text_of("b") == "third"
    assert (len(once_more), once_more.manifest.deleted) == (5, 2)


def test_a_corpus_that_changes_between_two_readings_is_noticed(tmp_path: Path, word_sum: DenseModel) -> None:
    class Shrinking:
        def __init__(self) -> None:
            self.left = 5

        def __iter__(self) -> Iterator[Document]:
            self.left -= 1
            return iter(MANY[: self.left])

    with pytest.raises(InputError, match="4 documents at the first reading, 3 at a later one"):
        build_index(Shrinking(), word_sum, tmp_path / "i")


def test_a_build_without_a_word_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of the documents has a word"):
        build_index([Document("a", "!"), Document("b", "? ?")], "bm25", tmp_path / "words")
    assert not (tmp_path / "words").exists()
