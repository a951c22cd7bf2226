"""The exact engines behind the protocol: what every engine has to keep, on the ones that can be computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.engines import AnyCodec, AnySegment, Sample, open_codec, parse_params, train_codec
from quiver.retrieval.index.files import REAL, DamagedIndexError, Files
from quiver.retrieval.records import ModelCard

DIM = 12
NAMES = {"dense": "exact-dense", "colbert": "exact-tokens"}


def codec_of(kind: Any) -> AnyCodec:
    card = ModelCard("m", kind, "f" * 64, DIM, "dot" if kind == "dense" else "maxsim", 9, 9)
    sample = Sample(np.zeros((0, DIM), np.float32))
    return train_codec(NAMES[kind], sample, card, documents=1, vectors=1, settings={}, seed=0)


def documents(kind: str, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(3)
    lengths = np.ones(count, np.int64) if kind == "dense" else rng.integers(0, 6, count)
    return rng.standard_normal((int(lengths.sum()), DIM)).astype(np.float32), lengths


def write(codec: AnyCodec, folder: Path, vectors: NDArray[np.float32], lengths: NDArray[np.int64], chunk: int) -> AnySegment:
    folder.mkdir()
    writer = codec.writer(folder, REAL)
    ends = np.append(0, np.cumsum(lengths))
    for start in range(0, len(lengths), chunk):
        stop = min(start + chunk, len(lengths))
        writer.add(vectors[ends[start] : ends[stop]], None if codec.name == "exact-dense" else lengths[start:stop])
    assert set(writer.close()) == {path.name for path in folder.iterdir()}
    return codec.open(Files(folder), len(lengths))


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_scores_vectors_and_sizes_of_rows(tmp_path: Path, kind: str) -> None:
    codec = codec_of(kind)
    vectors, lengths = documents(kind, 30)
    segment = write(codec, tmp_path / "s", vectors, lengths, 30)
    assert len(segment) == 30
    np.testing.assert_array_equal(segment.lengths, lengths)
    assert segment.size.resident == 0
    assert segment.size.mapped >= vectors.nbytes
    rows = np.array([29, 3, 3, 0, 17])
    ends = np.append(0, np.cumsum(lengths))
    wanted = [vectors[ends[row] : ends[row + 1]] for row in rows]
    found, counts = segment.vectors(rows)
    np.testing.assert_array_equal(found, np.concatenate(wanted))
    np.testing.assert_array_equal(counts, lengths[rows])
    query = np.random.default_rng(9).standard_normal((4, DIM)).astype(np.float32)
    if kind == "dense":
        np.testing.assert_allclose(segment.exact_scores(query[0], rows), [float(each[0] @ query[0]) for each in wanted], rtol=1e-5)
    else:
        best = [(query @ each.T).max(axis=1).sum() if len(each) else -np.inf for each in wanted]
        np.testing.assert_allclose(segment.exact_scores(query, rows), best, rtol=1e-5)
    assert len(segment.exact_scores(query[0] if kind == "dense" else query, rows[:0])) == 0
    assert segment.vectors(rows[:0])[0].shape == (0, DIM)


@pytest.mark.parametrize(
    "content", ["{}", '{"vectors": null}', '{"vectors": 20, "largest_norm": -1}', '{"vectors": 20, "largest_norm": "x"}']
)
def test_facts_that_are_missing_or_cannot_be_are_damage(tmp_path: Path, content: str) -> None:
    codec = codec_of("dense")
    write(codec, tmp_path / "s", *documents("dense", 20), 20)
    (tmp_path / "s" / "vectors.json").write_text(content)
    with pytest.raises(DamagedIndexError, match=r"vectors\.json"):
        codec.open(Files(tmp_path / "s"), 20)
    (tmp_path / "codec.json").write_text(content)
    for name in NAMES.values():
        with pytest.raises(DamagedIndexError, match=r"codec\.json"):
            open_codec(name, tmp_path)


def test_an_exact_engine_refuses_settings_and_search_parameters() -> None:
    with pytest.raises(InputError, match=r"has no search parameter .nprobe.; it has none"):
        parse_params(codec_of("dense"), {"nprobe": 3})
    card = ModelCard("m", "dense", "f" * 64, DIM, "dot", 9, 9)
    sample = Sample(np.zeros((0, DIM), np.float32))
    with pytest.raises(InputError, match=r"exact-dense has no setting .bits.; it has none"):
        train_codec("exact-dense", sample, card, documents=1, vectors=1, settings={"bits": 4}, seed=0)
    with pytest.raises(InputError, match=r"does not exist for a dense model; choose one of exact-dense"):
        train_codec("exact-tokens", sample, card, documents=1, vectors=1, settings={}, seed=0)
    with pytest.raises(InputError, match="made by the index engine 'other'"):
        open_codec("other", Path())
