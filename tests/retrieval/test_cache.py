"""The user's cache: its size is limited, the least recently used entries are deleted first, and entries in use are kept."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.cli.options import VectorCache
from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import EmbeddingStore
from quiver.retrieval.index import build_index
from quiver.retrieval.records import Document
from quiver.retrieval.search.bm25 import word_index

DAY = 86_400


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QUIVER_CACHE_LIMIT", raising=False)
    return tmp_path / "cache"


def used(path: Path, days: float) -> Path:
    """Set the last use of an entry to a number of days ago."""
    then = time.time() - days * DAY
    os.utime(path, (then, then))
    return path


def shards(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("*.arrow"))


def texts(prefix: str) -> list[str]:
    """Texts whose vectors take half a megabyte."""
    return [f"{prefix} {number}" for number in range(512)]


def test_least_recently_used_vectors_are_deleted_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, word_sum: Any, other_word_sum: Any
) -> None:
    store = EmbeddingStore(cache / "vectors")
    for prefix, days in (("a", 5), ("b", 4), ("c", 3)):
        before = set(shards(cache))
        store.encode(word_sum, texts(prefix), "document")
        (new,) = set(shards(cache)) - before
        used(new, days)
    monkeypatch.setenv("QUIVER_CACHE_LIMIT", "1700KB")  # three of the shards fit
    store.encode(word_sum, texts("a"), "document")  # read again: now "b" is the oldest
    assert len(shards(cache)) == 3
    store.encode(other_word_sum, texts("d"), "document")
    assert len(shards(cache)) == 3
    word_sum.calls.clear()
    for prefix, encoded in (("a", 0), ("c", 0), ("b", 512)):
        stored = store.encode(word_sum, texts(prefix), "document")
        assert sum(len(each) for _, each in word_sum.calls) == encoded
        assert stored.rows.shape == (512, 256)
    assert len(shards(cache)) == 4  # over the limit: all of them were used a moment ago


def test_vectors_in_use_are_not_deleted(cache: Path, quiver: Callable[..., Any], word_sum: Any) -> None:
    stored = EmbeddingStore(cache / "vectors").encode(word_sum, texts("a"), "document")
    (shard,) = shards(cache)
    for days, left in ((0.9, 1), (1.1, 0)):
        stored.rows.take(np.array([3, 400]))
        assert json.loads(quiver("cache", "prune", "--size", "0GB", "--json").out)["removed"] == []
        used(shard, days)
        done = json.loads(quiver("cache", "prune", "--size", "0GB", "--json").out)
        assert len(shards(cache)) == left
        assert len(done["removed"]) == 1 - left
    with pytest.raises(InputError, match="run the command again"):
        stored.rows.take(np.array([3, 400]))


def test_folders_outside_the_cache_are_never_pruned(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_sum: Any) -> None:
    monkeypatch.setenv("QUIVER_CACHE_LIMIT", "1KB")
    store = EmbeddingStore(tmp_path / "mine")
    for prefix in "ab":
        store.encode(word_sum, texts(prefix), "document")
        for shard in shards(tmp_path / "mine"):
            used(shard, 30)
    store.encode(word_sum, texts("c"), "document")
    assert len(shards(tmp_path / "mine")) == 3
    monkeypatch.setenv("QUIVER_CACHE", "~nobody-of-this-name/cache")
    store.encode(word_sum, texts("d"), "document")
    assert len(shards(tmp_path / "mine")) == 4


def test_words_are_pruned_and_counted_again(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_sum: Any) -> None:
    indexes = []
    for number, word in enumerate(("granite", "basalt")):
        documents = [Document(f"d{each}", f"{word} word{each}") for each in range(20)]
        indexes.append(build_index(documents, word_sum, tmp_path / f"i{number}"))
    word_index(indexes[0], cache=cache / "words")
    (first,) = (cache / "words").iterdir()
    used(first, 2)
    monkeypatch.setenv("QUIVER_CACHE_LIMIT", "1KB")
    assert len(word_index(indexes[1], cache=cache / "words").search(["basalt"], 5).ids[0]) == 5
    (second,) = (cache / "words").iterdir()
    assert second != first
    assert len(word_index(indexes[0], cache=cache / "words").search(["granite"], 5).ids[0]) == 5
    assert {first, second} == set((cache / "words").iterdir())


def test_the_commands_show_and_prune_the_cache(
    cache: Path, quiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, word_sum: Any
) -> None:
    assert json.loads(quiver("cache", "info", "--json").out)["vectors"] == {"entries": 0, "bytes": 0}
    store = EmbeddingStore(cache / "vectors")
    for prefix, days in (("a", 9), ("b", 8)):
        before = set(shards(cache))
        store.encode(word_sum, texts(prefix), "query")
        (new,) = set(shards(cache)) - before
        used(new, days)
    (cache / "collections" / "beir").mkdir(parents=True)
    (cache / "collections" / "beir" / "corpus.jsonl").write_text("x" * 1000)
    used(cache / "collections" / "beir", 99)
    info = json.loads(quiver("cache", "info", "--json").out)
    assert (info["folder"], info["limit"], info["vectors"]["entries"]) == (str(cache), 20 << 30, 2)
    assert info["collections"] == {"entries": 1, "bytes": 1000}
    shown = quiver("cache", "info")
    assert shown.code == 0
    assert "20.00 GB" in shown.out
    assert "0 entries removed" in quiver("cache", "prune").out
    assert "1 entries removed" in quiver("cache", "prune", "--size", "600KB").out
    assert len(shards(cache)) == 1
    monkeypatch.setenv("QUIVER_CACHE_LIMIT", "none")
    assert json.loads(quiver("cache", "prune", "--json").out)["removed"] == []
    monkeypatch.setenv("QUIVER_CACHE_LIMIT", "much")
    done = quiver("cache", "info")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "QUIVER_CACHE_LIMIT: 'much' is not a size; write one as 500MB or 2GB" in done.err
    with pytest.raises(InputError, match="QUIVER_CACHE_LIMIT: 'much' is not a size"):
        store.encode(word_sum, ["new"], "query")
    assert (cache / "collections" / "beir" / "corpus.jsonl").is_file()


def test_vectors_are_kept_for_one_run_where_the_cache_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "cache", "~nobody-has-this-name/cache"):
        monkeypatch.setenv("QUIVER_CACHE", str(folder))
        caplog.clear()
        assert VectorCache().folder() is None
        assert [record.getMessage().count("for this run only") for record in caplog.records] == [1]
