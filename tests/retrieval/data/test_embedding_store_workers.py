"""Chunks encoded by workers: the vectors, the shards and their order are those of one process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder import InputError
from quiver.retrieval.cluster import LocalProcesses
from quiver.retrieval.data.embedding_store import EmbeddingStore, StoreLimits, encode_chunks
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import IN_PROCESS
from tests.retrieval.executors import Backwards
from tests.retrieval.models.small import make_dense, make_tokenizer

TEXTS = [f"{word} {number}" for number in range(12) for word in ("stone", "bird", "sea", "stone")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_dense(make_tokenizer(TEXTS), max_length=24).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def shards(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*/*/*.arrow"))]


@pytest.mark.slow
def test_workers_write_the_same_store_as_one_process(tmp_path: Path, model: Path) -> None:
    limits = StoreLimits(chunk_texts=4, shard_texts=8)
    loaded = load_model(model)
    here = EmbeddingStore(tmp_path / "here", limits=limits).encode(loaded, TEXTS, "document")
    there = EmbeddingStore(tmp_path / "there", LocalProcesses(2), limits=limits).encode(loaded, iter(TEXTS), "document")
    assert len(shards(tmp_path / "here")) == 5  # 36 texts that differ
    assert shards(tmp_path / "there") == shards(tmp_path / "here")
    assert there.counts == here.counts
    np.testing.assert_array_equal(there.rows.span(0, len(TEXTS)), here.rows.span(0, len(TEXTS)))


def test_chunks_of_workers_are_returned_in_order(model: Path) -> None:
    loaded, executor, counted = load_model(model), Backwards(), list[int]()
    chunks = [(f"text {number}",) for number in range(5)]
    found = list(encode_chunks(loaded, chunks, "document", executor=executor, advance=counted.append))
    assert counted == [1] * 5  # as they are encoded, by the workers
    assert [number for number, *_ in executor.done] == [4, 3, 2, 1, 0]
    assert [chunk for chunk, _ in found] == chunks
    again = list(encode_chunks(loaded, chunks, "document", executor=IN_PROCESS))
    for (_, one), (_, two) in zip(found, again, strict=True):
        np.testing.assert_array_equal(one.vectors, two.vectors)


def test_queries_are_encoded_in_this_process(tmp_path: Path, word_sum: Any) -> None:
    """A model that workers cannot load."""
    stored = EmbeddingStore(tmp_path, LocalProcesses(2)).encode(word_sum, ["a bird"], "query")
    assert stored.counts.texts == 1


def test_mistakes_with_executors_are_reported_in_one_line(
    quiver: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"_id": "a", "text": "stone"}\n')
    monkeypatch.setitem(sys.modules, "ray", None)
    wrong = [
        (("--executor", "slurm"), "unknown executor 'slurm'; choose one of local, ray"),
        (("--executor", "ray"), "Ray is not installed; run: pip install 'quiver-retrieval[ray]'"),
        (("--address", "a:1"), "--address is the address of a Ray cluster; add --executor ray, or remove --address"),
        (("--workers", 0), "Invalid value for '--workers'"),
    ]
    commands: list[tuple[object, ...]] = [
        ("index", "build", corpus, "--model", model, "--out", tmp_path / "i"),
        ("evaluate", "--model", model, "--data", tmp_path, "--out", tmp_path / "e"),
        ("mine", corpus, "--model", model, "--out", tmp_path / "m"),
        ("teacher-scores", corpus, "--teacher", model, "--out", tmp_path / "s"),
    ]
    for command in commands:
        for options, message in wrong:
            done = quiver(*command, *options)
            assert (done.code, done.err.count("\n")) == (2, 1), done.err
            assert message in done.err
    done = quiver("mine", corpus, "--model", "bm25", "--workers", 2, "--out", tmp_path / "m")
    assert (done.code, done.err) == (
        2,
        "quiver: error: --executor, --workers, --address and --devices distribute encoding, and bm25 encodes nothing; remove them\n",
    )
    assert {path.name for path in tmp_path.iterdir()} == {"c.jsonl", "model"}


def test_a_model_of_another_library_cannot_be_encoded_by_workers(tmp_path: Path, word_sum: Any) -> None:
    word_sum.card = dataclasses.replace(word_sum.card, library="pylate")
    with pytest.raises(InputError, match="workers cannot run pylate models"):
        EmbeddingStore(tmp_path, LocalProcesses(1)).encode(word_sum, ["a"], "document")
