"""An index built by workers is the one that a single process builds, also where an item is done twice because its worker seemed dead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder import InputError
from quiver.encoder.work_folder import WorkFolder
from quiver.retrieval.cluster import LocalProcesses
from quiver.retrieval.index import BuildOptions, IndexReader, build_index
from quiver.retrieval.index.build import plan_pieces
from quiver.retrieval.index.engines import Sample, train_codec
from quiver.retrieval.index.pieces import PieceSizes
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import Document, Executor, ModelCard
from tests.retrieval.executors import Backwards
from tests.retrieval.models.small import make_colbert, make_dense, make_tokenizer

WORDS = ["granite", "water", "bird", "stone", "river", "cloud", "leaf", "sand", "wind", "fire"]


def documents(count: int, words: int = 30) -> list[Document]:
    rng = np.random.default_rng(5)
    return [Document(f"d{number:04d}", " ".join(rng.choice(WORDS, 1 + number % words)), "", {"n": number}) for number in range(count)]


def make_model(folder: Path, kind: str) -> Path:
    """A model that encodes in no time."""
    words = make_tokenizer(WORDS)
    if kind == "dense":
        made: Any = make_dense(words, max_length=64, normalize=True)
    else:
        made = make_colbert(words, projections=(Projection(32, 32),), query_prefix="", document_prefix="", query_length=16)
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of finished pieces in the folder of a build, just before it is removed."""
    seen: list[int] = []
    remove = WorkFolder.remove

    def looked(work: WorkFolder) -> None:
        seen.append(len([*work.path.glob("piece-*/seal.json")]))
        remove(work)

    monkeypatch.setattr(WorkFolder, "remove", looked)
    return lambda: seen[-1]


def sums(index: IndexReader) -> list[dict[str, str]]:
    folders = [*index.manifest.segments, index.manifest.codec]
    return [{name: entry.sha256 for name, entry in each.files.items()} for each in folders]


def test_chunks_are_those_of_one_reading_whatever_the_pieces() -> None:
    rng, card = np.random.default_rng(1), ModelCard("m", "dense", "a" * 64, 4, "dot", 9, 9)
    codec = train_codec("exact-dense", Sample(np.zeros((0, 4), np.float32)), card, documents=40, vectors=40, settings={}, seed=0)
    for documents in (1, 7, 40):
        lengths = rng.integers(0, 9, 40).astype(np.uint32)
        ends, first = list[int](), 0
        while first < 40:  # one document after the other
            held, stop = 0, first
            while stop < 40 and stop - first < 6 and held < 20:
                held += int(lengths[stop])
                stop += 1
            ends.append(stop)
            first = stop
        sizes = PieceSizes(chunk_documents=6, chunk_characters=20, documents=documents, count=1)
        pieces = plan_pieces(lengths, BuildOptions(pieces=sizes), card, codec)
        assert [end for piece in pieces for end in piece] == ends
        assert (len(pieces) == len(ends), len(pieces) == 1) == (documents == 1, documents == 40)


@pytest.mark.parametrize(
    ("kind", "engine", "executor"),
    [
        ("dense", "exact", Backwards(twice=True)),
        ("colbert", "ivf-tokens", Backwards(twice=True)),
        pytest.param("colbert", "ivf-tokens", LocalProcesses(2), marks=pytest.mark.slow),
    ],
)
def test_workers_build_the_same_bytes(tmp_path: Path, kind: str, engine: str, executor: Executor, pieces: Callable[[], int]) -> None:
    model, given = load_model(make_model(tmp_path / "model", kind)), documents(100)
    options = BuildOptions(engine, calibrate=False, pieces=PieceSizes(chunk_documents=4, documents=8))
    whole = build_index(given, model, tmp_path / "whole", options=options)
    built = build_index(iter(given), model, tmp_path / "built", options=options, executor=executor)
    assert sums(built) == sums(whole)
    assert pieces() == 13
    assert list(built.documents) == given
    assert not any((tmp_path / "built" / "tmp").iterdir())


def test_input_that_workers_cannot_use_is_one_line(tmp_path: Path, word_sum: Any) -> None:
    with pytest.raises(InputError, match="word-sum-a"):
        build_index(documents(20), word_sum, tmp_path / "i", executor=LocalProcesses(2))
    model = load_model(make_model(tmp_path / "model", "dense"))
    _ = model.card
    other = make_model(tmp_path / "other", "dense")
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"the model on .* has the fingerprint .*; all machines need the same model files"):
        build_index(documents(20), model, tmp_path / "i", executor=LocalProcesses(2))
    assert not (tmp_path / "i").exists()
