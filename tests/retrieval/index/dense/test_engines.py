"""The compressed dense engines behind the protocol: whatever finds the candidates, rules and scores are the same."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index.dense.refine import ScalarCoding
from quiver.retrieval.index.engines import open_codec
from quiver.retrieval.index.files import REAL, DamagedIndexError, Files
from quiver.retrieval.models.encoding import comparable

KINDS = ["pq", "pq4", "pq16", "ivf", "faiss-ivf", "faiss-graph", "faiss-codes", "faiss-rotated"]
# One of each way to write and to find.
FEW_KINDS = ["pq", "ivf", "faiss-graph", "faiss-codes"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("share", [None, 0.0, 0.01, 0.1, 0.5, 1.0])
def test_exhaustive_search_equals_brute_force_over_allowed_documents(
    dense: Any, documents: Any, segments: Any, kind: str, share: float | None
) -> None:
    codec, segment = segments[kind]
    allowed = None if share is None else np.random.default_rng(3).random(len(segment)) < share
    queries = documents.queries(8)
    for k in (1, 10, 2000):
        found = segment.search(queries, k, params=codec.preset_params("exact", k=k), ranks=documents.ranks, allowed=allowed)
        for query, each in zip(queries, found, strict=True):
            rows, scores = dense.brute_force(segment, query, k, documents.ranks, allowed)
            assert each.rows.tolist() == rows
            np.testing.assert_array_equal(each.scores, scores)
            np.testing.assert_array_equal(each.scores, segment.exact_scores(query, each.rows))


@pytest.mark.parametrize("share", [None, 0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("preset", ["balanced", "fast"])
def test_hits_are_allowed_and_scored_as_brute_force_and_nearly_complete(
    dense: Any, documents: Any, segments: Any, kind: str, share: float | None, preset: Any
) -> None:
    codec, segment = segments[kind]
    allowed = None if share is None else np.random.default_rng(4).random(len(segment)) < share
    queries = documents.queries(30)
    effort = codec.preset_params(preset, k=5)
    found = segment.search(queries, 5, params=effort, ranks=documents.ranks, allowed=allowed)
    wanted = segment.search(queries, 5, params=codec.preset_params("exact", k=5), ranks=documents.ranks, allowed=allowed)
    for query, each in zip(queries, found, strict=True):
        assert len(each.rows) == len(set(each.rows.tolist())) == 5
        assert each.rows.min() >= 0
        assert allowed is None or allowed[each.rows].all()
        np.testing.assert_array_equal(each.scores, segment.exact_scores(query, each.rows))
        assert (np.diff(each.scores) <= 0).all()
    # Eight codes of four bits are hardly a sixteenth of the vectors; everything else loses next to nothing at its defaults.
    assert dense.overlap(found, wanted) >= (0.7 if kind == "faiss-codes" or preset == "fast" else 0.99)


def test_a_query_finds_the_same_alone_and_among_others(documents: Any, segments: Any, kind: str) -> None:
    codec, segment = segments[kind]
    queries = documents.queries(25)
    effort = codec.preset_params("fast", k=5)
    together = segment.search(queries, 5, params=effort, ranks=documents.ranks)
    for query, found in zip(queries, together, strict=True):
        (alone,) = segment.search(query[None], 5, params=effort, ranks=documents.ranks)
        np.testing.assert_array_equal(found.rows, alone.rows)
        np.testing.assert_array_equal(found.scores, alone.scores)
    assert segment.search(queries[:0], 5, params=effort, ranks=documents.ranks) == []


def test_zero_vectors_are_documents_and_queries_like_others(dense: Any, documents: Any, tmp_path: Path, kind: str) -> None:
    vectors = documents.vectors.copy()
    vectors[::7] = 0
    codec = dense.collection().codec(kind)
    segment = dense.write(codec, tmp_path / "s", vectors)
    np.testing.assert_allclose(segment.vectors(np.arange(0, 1500, 7))[0], 0, atol=0.01)
    for preset in ("exact", "balanced"):
        (found,) = segment.search(np.zeros((1, 16), np.float32), 5, params=codec.preset_params(preset, k=5), ranks=documents.ranks)
        assert found.scores.tolist() == [0.0] * 5
        assert documents.ranks[found.rows].tolist() == [1499, 1498, 1497, 1496, 1495]
    only = np.zeros(1500, bool)
    only[::7] = True
    (found,) = segment.search(documents.queries(1), 9, params=codec.preset_params("balanced", k=9), ranks=documents.ranks, allowed=only)
    assert len(found.rows) == 9
    assert not (found.rows % 7).any()


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 33])
@pytest.mark.parametrize("kind", ["pq", "pq4", "pq8", "ivf"])
def test_any_width(dense: Any, tmp_path: Path, kind: str, width: int) -> None:
    documents = dense.collection(600, width=width, unit=False)
    codec = documents.codec(kind)
    segment = dense.write(codec, tmp_path / "s", documents.vectors)
    queries = documents.queries(5)
    np.testing.assert_allclose(segment.vectors(np.arange(600))[0], documents.vectors, atol=0.05)
    for query, found in zip(
        queries, segment.search(queries, 7, params=codec.preset_params("exact", k=7), ranks=documents.ranks), strict=True
    ):
        assert found.rows.tolist() == dense.brute_force(segment, query, 7, documents.ranks, None)[0]
    found = segment.search(queries, 1, params=codec.preset_params("balanced", k=1), ranks=documents.ranks)
    assert [len(each.rows) for each in found] == [1] * 5


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("kind", ["pq", "ivf", "faiss-ivf"])
def test_scores_are_the_models_similarity(dense: Any, tmp_path: Path, kind: str, similarity: Any) -> None:
    """Lengths that differ by a factor of a hundred: for the dot product the long ones win, for the cosine they do not."""
    raw = dense.collection(1200, unit=False)
    lengths = np.exp(np.random.default_rng(0).uniform(0, np.log(100), (1200, 1))).astype(np.float32)
    card = raw.card.__class__(**{**raw.card.__dict__, "similarity": similarity})
    documents = type(raw)(comparable(raw.vectors * lengths, card))
    queries = comparable(raw.queries(40), card)
    codec = documents.codec(kind)
    segment = dense.write(codec, tmp_path / "s", documents.vectors)
    exact = queries.astype(float) @ documents.vectors.astype(float).T
    found = segment.search(queries, 10, params=codec.preset_params("balanced", k=10), ranks=documents.ranks)
    recall = []
    for scores, each in zip(exact, found, strict=True):
        np.testing.assert_allclose(each.scores, scores[each.rows], atol=0.02 * np.abs(scores).max())
        recall.append(len({*each.rows.tolist()} & {*np.argsort(-scores)[:10].tolist()}) / 10)
    assert np.mean(recall) >= 0.95


def test_chunks_and_merges_give_the_bytes_of_one_writing(dense: Any, tmp_path: Path, kind: str) -> None:
    documents = dense.collection(900)
    codec = documents.codec(kind)
    whole = dense.write(codec, tmp_path / "whole", documents.vectors)
    dense.write(codec, tmp_path / "chunked", documents.vectors, chunk=7)
    assert dense.bytes_of(tmp_path / "whole") == dense.bytes_of(tmp_path / "chunked")
    second = dense.write(codec, tmp_path / "second", documents.vectors[600:])
    rng = np.random.default_rng(5)
    keep, rest = rng.random(900) < 0.4, rng.random(300) < 0.7
    (tmp_path / "merged").mkdir()
    holds = codec.merge([(whole, keep), (second, np.zeros(300, bool)), (second, rest)], tmp_path / "merged", REAL)
    assert set(holds) == {path.name for path in (tmp_path / "merged").iterdir()}
    rows = np.append(np.flatnonzero(keep), 600 + np.flatnonzero(rest))
    dense.write(codec, tmp_path / "expected", documents.vectors[rows])
    assert dense.bytes_of(tmp_path / "merged") == dense.bytes_of(tmp_path / "expected")


def test_equal_input_gives_equal_bytes_and_a_saved_codec_writes_the_same(dense: Any, tmp_path: Path, kind: str) -> None:
    documents = dense.collection(900)
    for name in ("a", "b"):
        codec = documents.codec(kind)
        (tmp_path / name).mkdir()
        assert set(codec.save(tmp_path / name, REAL)) == {path.name for path in (tmp_path / name).iterdir()}
        dense.write(codec, tmp_path / f"s-{name}", documents.vectors)
    opened = open_codec(codec.name, tmp_path / "a")
    (tmp_path / "c").mkdir()
    opened.save(tmp_path / "c", REAL)
    dense.write(opened, tmp_path / "s-c", documents.vectors)
    for name in ("b", "c"):
        assert dense.bytes_of(tmp_path / name) == dense.bytes_of(tmp_path / "a")
        assert dense.bytes_of(tmp_path / f"s-{name}") == dense.bytes_of(tmp_path / "s-a")
    assert (opened.name, dict(opened.parameters)) == (codec.name, dict(codec.parameters))
    for preset in ("exact", "balanced", "fast"):
        assert opened.preset_params(preset, k=10) == codec.preset_params(preset, k=10)


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_files_that_are_missing_or_of_another_size_are_damage(dense: Any, documents: Any, tmp_path: Path, kind: str) -> None:
    codec = documents.codec(kind)
    dense.write(codec, tmp_path / "s", documents.vectors[:300])
    names = sorted(dense.bytes_of(tmp_path / "s"))
    assert len(names) == 3

    def search() -> None:
        segment = codec.open(Files(tmp_path / "s"), 300)
        segment.search(documents.queries(1), 3, params=codec.preset_params("fast", k=3), ranks=documents.ranks)

    for name in names:
        path = tmp_path / "s" / name
        content = path.read_bytes()
        # What follows behind an index FAISS does not read; that sizes are as they were is the store's affair.
        for damage in (content[:-1],) if name == "index.faiss" else (content[:-1], content + b"\0\0\0\0"):
            path.write_bytes(damage)
            with pytest.raises(DamagedIndexError):
                search()
        path.unlink()
        with pytest.raises(FileNotFoundError):
            codec.open(Files(tmp_path / "s"), 300)
        path.write_bytes(content)
    search()


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_a_codec_whose_files_do_not_fit(dense: Any, documents: Any, tmp_path: Path, kind: str) -> None:
    codec = documents.codec(kind)
    codec.save(tmp_path, REAL)
    names = sorted(dense.bytes_of(tmp_path))
    for name in names:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(b"{}" if name.endswith(".json") else content[: len(content) // 2])
        with pytest.raises(InputError):
            open_codec(codec.name, tmp_path)
        (tmp_path / name).write_bytes(content)
    assert dict(open_codec(codec.name, tmp_path).parameters) == dict(codec.parameters)


@pytest.mark.parametrize("kind", ["pq", "ivf", "faiss-ivf"])
def test_writing_stays_within_the_declared_memory(dense: Any, tmp_path: Path, kind: str) -> None:
    documents = dense.collection(12_000, width=64)
    codec = documents.codec(kind)
    dense.write(codec, tmp_path / "warm", documents.vectors[:50])
    (tmp_path / "s").mkdir()
    writer = codec.writer(tmp_path / "s", REAL)
    tracemalloc.start()
    try:
        writer.add(documents.vectors)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    writer.close()
    assert peak < codec.memory(12_000, 12_000)
    if not kind.startswith("faiss"):
        assert codec.memory(10**9, 10**9) == codec.memory(1, 1) < 32 << 20
    else:
        index = (tmp_path / "s" / "index.faiss").stat().st_size
        assert index < codec.memory(12_000, 12_000) < 2 * index + (16 << 20)


def test_training_takes_at_most_the_size_of_the_sample_again(dense: Any) -> None:
    """Of the memory of a build one half is the sample's, the other one is for what is learned from it."""
    vectors = dense.collection(60_000, width=32).vectors
    for learn in (lambda: ScalarCoding.learn(vectors), lambda: type(dense.collection(1))(vectors).codec("faiss-codes", factory="Flat")):
        tracemalloc.start()
        try:
            learn()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1.1 * vectors.nbytes + (8 << 20)


@pytest.mark.parametrize("change", [{"dsub": 0}, {"dim": 0}, {"nlist": 0}, {"nlist": -1}, {"bits": 3}, {"dim": "wide"}])
def test_a_codec_of_numbers_that_cannot_be_is_damage(documents: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    documents.codec("ivf").save(tmp_path, REAL)
    path = tmp_path / "codec.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DamagedIndexError):
        open_codec("ivf-dense", tmp_path)


def test_a_vector_that_is_too_long_for_bytes(documents: Any, tmp_path: Path, kind: str) -> None:
    writer = documents.codec(kind).writer(tmp_path, REAL)
    vectors = documents.vectors[:3].copy()
    vectors[1] = 3e38
    with pytest.raises(InputError, match="too large for quantized codes; use the engine exact-dense"):
        writer.add(vectors)
    writer.close()
