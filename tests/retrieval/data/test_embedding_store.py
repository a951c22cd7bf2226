"""The embedding store: no text is encoded twice, and kills and damage lose only what they must."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import VERSION, EmbeddingStore, StoredVectors, StoreLimits, text_keys
from quiver.retrieval.records import DenseEncoding, ModelCard, TextTokens, TokenCounts, TokenEncoding, row_blocks

TEXTS = ["a b", "c", "a b", "", "d e f", "c", "g", "h", "i j", "", "k", "l m n o"]
DISTINCT = 9


SMALL = StoreLimits(chunk_texts=3, shard_texts=4)  # a dozen texts make several chunks and shards


def small_store(folder: Path) -> EmbeddingStore:
    return EmbeddingStore(folder, limits=SMALL)


class Counting:
    """A model without weights: the vector of a word is drawn from its bytes; texts are truncated to ``length`` words."""

    def __init__(self, kind: str = "dense", *, fingerprint: str = "a" * 64, similarity: str = "dot", length: int = 3) -> None:
        colbert = kind == "colbert"
        self.card = ModelCard("counting", "colbert" if colbert else "dense", fingerprint, 4, "dot", length, length)
        self.card = replace(self.card, similarity="maxsim" if colbert else similarity)
        self.asked: list[list[str]] = []
        self.length = length

    def encode_texts(self, texts: Sequence[str], role: str, *, progress: bool = False) -> Any:
        self.asked.append(list(texts))
        words = [text.split() for text in texts]
        counts = np.array([len(text) for text in words], np.int32)
        tokens = TextTokens(np.minimum(counts, self.length), counts > self.length, counts == 0)
        matrices = [np.array([vector(word) for word in text[: self.length]], np.float32).reshape(-1, 4) for text in words]
        if self.card.kind == "colbert":
            return TokenEncoding(matrices, tokens)
        return DenseEncoding(np.array([matrix.sum(axis=0) for matrix in matrices], np.float32), tokens)

    @property
    def texts(self) -> list[str]:
        return [text for call in self.asked for text in call]


def vector(word: str) -> NDArray[np.float64]:
    return np.random.default_rng(list(word.encode())).standard_normal(4)


def check(stored: StoredVectors, model: Counting, texts: Sequence[str]) -> None:
    """Check that every way of reading returns the vectors of the model."""
    encoding = Counting(model.card.kind, length=model.length).encode_texts(texts, "document")
    matrix = encoding.vectors if model.card.kind == "dense" else np.concatenate(encoding.vectors)
    assert stored.counts == encoding.counts
    assert stored.rows.shape == matrix.shape
    if model.card.kind == "dense":
        assert stored.lengths is None
    else:
        assert stored.lengths is not None
        assert stored.lengths.tolist() == [len(rows) for rows in encoding.vectors]
    for size in (1, 4, 1000):
        blocks = list(row_blocks(stored.rows, size))
        assert [start for start, _ in blocks] == list(range(0, len(matrix), size))
        np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), matrix)
    np.testing.assert_array_equal(stored.rows.span(2, 7), matrix[2:7])
    some = np.random.default_rng(0).integers(0, len(matrix), 50)
    np.testing.assert_array_equal(stored.rows.take(some), matrix[some])
    assert stored.rows.take(np.empty(0, np.int64)).shape == (0, 4)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.arrow"))


def damage_vectors(shard: Path, word: str) -> None:
    content = bytearray(shard.read_bytes())
    content[content.index(vector(word).astype(np.float32).tobytes()) + 7] ^= 1
    shard.write_bytes(content)


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_stored_texts_are_not_encoded_again(tmp_path: Path, kind: str) -> None:
    model = Counting(kind)
    first = small_store(tmp_path).encode(model, iter(TEXTS), "document")
    check(first, model, TEXTS)
    assert first.reused == 0
    assert sorted(model.texts) == sorted(set(TEXTS))  # a text that is there twice is encoded once
    assert [len(call) for call in model.asked] == [3, 3, 3]  # and the calls are full in spite of that
    assert len(shards(tmp_path)) == 2
    again, shuffled = Counting(kind), [TEXTS[place] for place in np.random.default_rng(1).permutation(len(TEXTS))]
    for texts in (TEXTS, shuffled, TEXTS[3:5] * 4):
        second = small_store(tmp_path).encode(again, texts, "document")
        check(second, again, texts)
        assert second.reused == len(texts)
    assert again.asked == []


def test_only_new_texts_are_encoded(tmp_path: Path) -> None:
    store, model = small_store(tmp_path), Counting()
    store.encode(model, TEXTS[:5], "document")
    model.asked.clear()
    mixed = ["new", *TEXTS, "newer", "new"]
    stored = store.encode(model, mixed, "document")
    check(stored, model, mixed)
    assert model.texts == ["new", "g", "h", "i j", "k", "l m n o", "newer"]
    assert stored.reused == 7  # "a b" twice, "c" twice, "" twice, "d e f"


def test_models_and_roles_are_kept_apart(tmp_path: Path) -> None:
    store = small_store(tmp_path)
    store.encode(Counting(), TEXTS, "document")
    for other, role in ((Counting(), "query"), (Counting(fingerprint="b" * 64), "document")):
        assert store.encode(other, TEXTS, role).reused == 0
        assert len(other.texts) == DISTINCT
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}-v{VERSION}" for name in ("a" * 64 + "-document", "a" * 64 + "-query", "b" * 64 + "-document")
    ]


def test_vectors_of_a_cosine_model_are_stored_at_unit_length(tmp_path: Path) -> None:
    model = Counting(similarity="cosine")
    for _ in range(2):
        rows = small_store(tmp_path).encode(model, ["a b", "", "c"], "document").rows.span(0, 3)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), [1, 0, 1], rtol=1e-6)
        np.testing.assert_allclose(rows[2], vector("c") / np.linalg.norm(vector("c")), rtol=1e-6)


def test_no_texts_give_no_vectors(tmp_path: Path) -> None:
    for kind in ("dense", "colbert"):
        stored = small_store(tmp_path).encode(Counting(kind, fingerprint=kind[0] * 64), [], "document")
        assert (stored.counts, stored.reused, stored.rows.shape) == (TokenCounts(0, 0, 0, 0), 0, (0, 4))
        assert list(row_blocks(stored.rows, 5)) == []
    words = small_store(tmp_path).encode(Counting("colbert"), ["", ""], "document")
    assert (words.rows.shape, words.lengths is not None and words.lengths.tolist()) == ((0, 4), [0, 0])


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_a_killed_process_loses_only_uncommitted_vectors(tmp_path: Path, kind: str) -> None:
    """Kills at each write are those of tests/test_work_folders.py."""

    class Killed(Counting):
        def encode_texts(self, texts: Sequence[str], role: str, *, progress: bool = False) -> Any:
            if len(self.asked) == 24:
                os._exit(137)
            return super().encode_texts(texts, role)

    texts, limits = [f"word{number} {'x ' * (number % 5)}" for number in range(400)], StoreLimits(chunk_texts=10, shard_texts=40)
    if not (child := os.fork()):
        EmbeddingStore(tmp_path, limits=limits).encode(Killed(kind), texts, "document")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 137
    model = Counting(kind)
    stored = EmbeddingStore(tmp_path, limits=limits).encode(model, texts, "document")
    assert (model.texts, stored.reused) == (texts[240:], 240)
    check(stored, model, texts)


def test_vectors_are_kept_when_the_first_attempt_to_write_them_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, calls = os.fsync, []

    def interrupted(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # of a shard
            raise KeyboardInterrupt
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small_store(tmp_path).encode(Counting(), TEXTS, "document")
    model = Counting()
    check(small_store(tmp_path).encode(model, TEXTS, "document"), model, TEXTS)
    assert 0 < len(model.texts) < DISTINCT


@pytest.mark.parametrize("failing", ["texts", "model"])
def test_vectors_encoded_before_an_error_are_kept(tmp_path: Path, failing: str) -> None:
    def broken() -> Iterator[str]:
        yield from TEXTS[:7]
        raise InputError("corpus.jsonl:8: malformed")

    class Failing(Counting):
        def encode_texts(self, texts: Sequence[str], role: str, *, progress: bool = False) -> Any:
            if "g" in texts:
                raise RuntimeError("out of memory")
            return super().encode_texts(texts, role)

    with pytest.raises(InputError if failing == "texts" else RuntimeError):
        small_store(tmp_path).encode(*((Counting(), broken()) if failing == "texts" else (Failing(), TEXTS)), "document")
    model = Counting()
    small_store(tmp_path).encode(model, TEXTS, "document")
    assert model.texts == ["d e f", "g", "h", "i j", "k", "l m n o"]


@pytest.mark.parametrize("damaged", ["keys", "vectors", "footer", "cut", "another", "missing"])
def test_a_damaged_shard_is_removed_and_its_texts_are_encoded_again(tmp_path: Path, damaged: str, caplog: pytest.LogCaptureFixture) -> None:
    small_store(tmp_path).encode(Counting(), TEXTS, "document")
    victim = shards(tmp_path)[0]
    content = bytearray(victim.read_bytes())
    if damaged == "missing":
        victim.unlink()
    elif damaged == "cut":
        victim.write_bytes(content[:-200])
    elif damaged == "another":
        table = pa.table({"key": [b"0" * 16]})
        with pa.OSFile(str(victim), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        key, vectors = bytes(text_keys(["c"])[0]), vector("c").astype(np.float32).tobytes()
        content[{"keys": content.index(key), "vectors": content.index(vectors) + 7, "footer": len(content) - 1}[damaged]] ^= 1
        victim.write_bytes(content)
    model = Counting()
    stored = small_store(tmp_path).encode(model, TEXTS, "document")
    check(stored, model, TEXTS)
    assert (len(model.texts), stored.reused) == (6, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.fullmatch(rf"{victim.parent}: damaged \(.*\); its texts are encoded again", caplog.records[0].getMessage())
    again = Counting()
    check(small_store(tmp_path).encode(again, TEXTS, "document"), again, TEXTS)
    assert again.asked == []


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_any_arrow_reader_opens_a_shard(tmp_path: Path, kind: str) -> None:
    model = Counting(kind)
    EmbeddingStore(tmp_path).encode(model, ["a", "b c", "", "d e f g"], "document")
    table = pa.ipc.open_file(shards(tmp_path)[0]).read_all()
    assert table["key"].to_pylist() == [bytes(key) for key in text_keys(["a", "b c", "", "d e f g"])]
    assert table.drop_columns(["key", "vectors"]).to_pylist() == [
        {"tokens": tokens, "truncated": tokens == 3, "empty": tokens == 0} for tokens in (1, 2, 0, 3)
    ]
    expected = model.encode_texts(["a", "b c", "", "d e f g"], "document").vectors
    assert table["vectors"].to_pylist() == [matrix.tolist() for matrix in expected]


def test_a_shard_that_vanishes_in_use_is_reported_in_one_line(tmp_path: Path) -> None:
    stored = small_store(tmp_path).encode(Counting(), TEXTS, "document")
    shards(tmp_path)[0].write_bytes(b"short")
    with pytest.raises(InputError, match=r"texts\.arrow: can no longer be read \(mmap length.*\); run the command again"):
        stored.rows.take(np.array([0]))
    shards(tmp_path)[0].unlink()
    with pytest.raises(InputError, match=r"texts\.arrow: can no longer be read \(No such file.*\); run the command again"):
        stored.rows.span(0, 1)


def test_only_requested_shards_are_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checksums of shards that hold none of the requested texts are not compared."""
    small_store(tmp_path).encode(Counting(), TEXTS, "document")
    last = shards(tmp_path)[-1]
    damage_vectors(last, "k")
    model = Counting()
    assert small_store(tmp_path).encode(model, ["a b", "c"], "document").reused == 2
    assert caplog.records == []
    assert last.exists()


def test_the_undamaged_copy_of_a_text_stored_twice_is_found(tmp_path: Path) -> None:
    start, models = threading.Barrier(2), [Counting(), Counting()]

    def late(texts: list[str]) -> Iterator[str]:
        start.wait()  # both have looked at the folder before either writes
        yield from texts

    workers = [threading.Thread(target=small_store(tmp_path).encode, args=(model, late(TEXTS), "document")) for model in models]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [len(model.texts) for model in models] == [DISTINCT, DISTINCT]
    assert len(shards(tmp_path)) == 4
    for victim in shards(tmp_path)[:1]:
        damage_vectors(victim, "c")
    again = Counting()
    check(small_store(tmp_path).encode(again, TEXTS, "document"), again, TEXTS)
    assert again.asked == []


def test_a_folder_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"cannot be created .*choose another folder for vectors"):
        small_store(tmp_path / "file").encode(Counting(), TEXTS, "document")
    with pytest.raises(ValueError, match="a fingerprint must be a hexadecimal number"):
        small_store(tmp_path).encode(Counting(fingerprint="../../elsewhere"), TEXTS, "document")


@pytest.mark.parametrize("kind", ["dense", "colbert"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_is_not_stored(tmp_path: Path, kind: str, bad: float) -> None:
    class Broken(Counting):
        def encode_texts(self, texts: Sequence[str], role: str, *, progress: bool = False) -> Any:
            encoding = super().encode_texts(texts, role)
            if "d e f" in texts:
                encoding.vectors[list(texts).index("d e f")][..., -1] = bad
            return encoding

    with pytest.raises(InputError, match="counting: the vector of the document 'd e f' is not finite"):
        small_store(tmp_path).encode(Broken(kind), TEXTS, "document")
    model = Counting(kind)
    check(small_store(tmp_path).encode(model, TEXTS, "document"), model, TEXTS)
    assert "d e f" in model.texts


def test_vectors_that_contradict_the_model_card_are_refused(tmp_path: Path) -> None:
    model = Counting()
    model.card = replace(model.card, dim=5)
    with pytest.raises(ValueError, match="width 4, its card says 5"):
        small_store(tmp_path).encode(model, TEXTS, "document")
    short = Counting(fingerprint="b" * 64)
    whole = short.encode_texts
    short.encode_texts = lambda texts, role, *, progress=False: whole(texts[1:], role)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="returned vectors for 2 texts, expected 3"):
        small_store(tmp_path).encode(short, TEXTS, "document")


def test_one_progress_bar_counts_encoded_and_stored_texts(tmp_path: Path, bars: Mapping[str, Any]) -> None:
    model, store = Counting(), small_store(tmp_path)
    store.encode(model, TEXTS[:6], "document", total=6, progress=True)
    store.encode(model, TEXTS, "document", total=12, progress=True, description="corpus")
    store.encode(model, ["q"], "query", progress=True)
    assert {name: (bar.total, sum(bar.steps)) for name, bar in bars.items()} == {
        "documents": (6, 6),
        "corpus": (12, 12),
        "queries": (None, 1),
    }


def test_long_texts_are_encoded_in_smaller_calls_and_large_vectors_in_smaller_shards(tmp_path: Path) -> None:
    limits = StoreLimits(chunk_texts=100, chunk_characters=50, shard_texts=4)
    texts = [f"{number} " + "y" * length for number, length in enumerate([10, 10, 10, 10, 60, 10, 20, 20, 20])]
    model = Counting()
    check(EmbeddingStore(tmp_path, limits=limits).encode(model, texts, "document"), model, texts)
    assert [len(call) for call in model.asked] == [4, 1, 2, 2]
    limits = replace(limits, shard_bytes=4 * 4 * 2, shard_texts=1000)
    EmbeddingStore(tmp_path / "bytes", limits=limits).encode(Counting(), texts, "document")
    assert len(shards(tmp_path / "bytes")) == 3  # of four, of one and two, of two: at least two vectors each


def test_vectors_of_a_slow_model_are_committed_after_a_time(tmp_path: Path) -> None:
    clock = iter(range(0, 10_000, 20))
    limits = StoreLimits(chunk_texts=3, shard_texts=1000, clock=lambda: float(next(clock)))
    EmbeddingStore(tmp_path, limits=limits).encode(Counting(), [str(number) for number in range(18)], "document")
    assert len(shards(tmp_path)) == 3  # six calls, 20 seconds each: every second one is more than 30 after the last commit


def test_texts_and_vectors_are_not_kept_in_memory(tmp_path: Path) -> None:
    """Encoding 20,000 texts of 1,000 characters to vectors of 1 KiB takes a few megabytes of memory."""
    store = EmbeddingStore(tmp_path, limits=StoreLimits(chunk_texts=256, shard_texts=1024))

    class Wide:
        card = ModelCard("wide", "dense", "d" * 64, 256, "dot", 9, 9)

        def encode_texts(self, texts: Sequence[str], role: str, *, progress: bool = False) -> DenseEncoding:
            one = np.ones(len(texts), np.int32)
            return DenseEncoding(np.full((len(texts), 256), len(texts[0]), np.float32), TextTokens(one, one > 1, one > 1))

    tracemalloc.start()
    try:
        stored = store.encode(Wide(), (f"{number:05d}" * 200 for number in range(20_000)), "document")
        total = sum(float(block.sum()) for _, block in row_blocks(stored.rows, 1024))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == 20_000 * 256 * 1000.0
    assert peak < 8 << 20


LARGE = """
import resource, sys
from pathlib import Path
import numpy as np
from quiver.retrieval.index import index_vectors
from quiver.retrieval.records import DenseEncoding, ModelCard, TextTokens
from quiver.retrieval.data.embedding_store import EmbeddingStore

class Random:
    card = ModelCard("random", "dense", "f" * 64, 384, "cosine", 9, 9)
    def encode_texts(self, texts, role, *, progress=False):
        one = np.ones(len(texts), np.int32)
        rng = np.random.default_rng(int(texts[0]))
        return DenseEncoding(rng.standard_normal((len(texts), 384), dtype=np.float32), TextTokens(one, one > 1, one > 1))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

before, count = peak(), 200_000
stored = EmbeddingStore(Path(sys.argv[1])).encode(Random(), map(str, range(count)), "document")
index = index_vectors([str(number) for number in range(count)], stored.rows, Random.card)
hits = index.search(stored.rows.span(0, 100), 100)
assert [found[0] for found in hits.ids] == [str(number) for number in range(100)]
print(index.nbytes, peak() - before)
"""


@pytest.mark.slow
def test_encoding_and_exact_search_take_less_memory_than_the_vectors(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, grown = map(int, done.stdout.split())
    assert size == 200_000 * 384 * 4
    assert grown < 0.75 * size
