"""The engine as a store uses it: written, searched, filtered and merged."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index.engines import AnyCodec, Sample, parse_params
from quiver.retrieval.index.files import REAL, DamagedIndexError, Files
from quiver.retrieval.index.tokens.codec import check_settings, open_tokens, train
from quiver.retrieval.index.tokens.segment import TokenSegment
from quiver.retrieval.index.tokens.settings import TokenParams

WIDE = TokenParams(nprobe=1000, tokens_k=100_000, candidates=10_000, slack=1e9)
"""All lists and all their tokens, by way of the lists."""


def codec_of(tokens: Any, **settings: Any) -> AnyCodec:
    size = len(tokens.vectors)
    return train(tokens.sample, tokens.card, documents=len(tokens.lengths), vectors=size, settings={"centroids": 64} | settings, seed=1)


def write(codec: AnyCodec, folder: Path, tokens: Any, *, chunk: int = 10**9) -> TokenSegment:
    folder.mkdir()
    writer, ends = codec.writer(folder, REAL), np.append(0, np.cumsum(tokens.lengths))
    for start in range(0, len(tokens.lengths), chunk):
        stop = min(start + chunk, len(tokens.lengths))
        part = slice(ends[start], ends[stop])
        writer.add(tokens.vectors[part], tokens.lengths[start:stop], tokens.token_ids[part])
    assert set(writer.close()) == {path.name for path in folder.iterdir()}
    return codec.open(Files(folder), len(tokens.lengths))


def bytes_of(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(segment: TokenSegment, query: NDArray[np.float32]) -> NDArray[np.float64]:
    """MaxSim with the decoded vectors, in double precision."""
    vectors, lengths = segment.vectors(np.arange(len(segment)))
    similarities = query.astype(float) @ vectors.astype(float).T
    ends = np.cumsum(lengths)
    parts = [similarities[:, end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return np.array([part.max(axis=1).sum() if part.shape[1] else -np.inf for part in parts])


@pytest.fixture(scope="module")
def tokens(make_collection: Callable[..., Any]) -> Any:
    return make_collection(500)


@pytest.fixture(scope="module")
def codec(tokens: Any) -> AnyCodec:
    return codec_of(tokens)


@pytest.fixture(scope="module")
def segment(codec: AnyCodec, tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> TokenSegment:
    return write(codec, tmp_path_factory.mktemp("segments") / "s", tokens)


@pytest.mark.parametrize("k", [1, 10, 499, 5000])
def test_looking_at_everything_is_brute_force_over_the_decoded_vectors(segment: TokenSegment, codec: AnyCodec, tokens: Any, k: int) -> None:
    findable = int((tokens.lengths > 0).sum())
    queries = tokens.queries(8)
    for effort in (codec.preset_params("exact", k=k), WIDE):
        for query, found in zip(queries, segment.search(queries, k, params=effort, ranks=tokens.ranks), strict=True):
            scores = decoded(segment, query)
            assert len(found.rows) == len(set(found.rows.tolist())) == min(k, findable)
            np.testing.assert_allclose(found.scores, np.sort(scores)[::-1][: min(k, findable)], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found.scores, scores[found.rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 3.5, 4])
@pytest.mark.parametrize("clustering", ["flat", "tokens", "two-level"])
def test_the_best_are_found(make_collection: Callable[..., Any], tmp_path: Path, bits: float, clustering: str) -> None:
    tokens = make_collection(800, width=64, seed=3)
    codec = codec_of(tokens, bits=bits, clustering=clustering, centroids=128)
    segment = write(codec, tmp_path / "s", tokens)
    queries = tokens.queries(25)
    # Fewer candidates than documents: they come from the lists.
    found = segment.search(queries, 10, params=parse_params(codec, {"candidates": 200}), ranks=tokens.ranks)
    shares = []
    for query, each in zip(queries, found, strict=True):
        shares.append(len(set(np.argsort(tokens.scores(query))[-10:].tolist()) & set(each.rows.tolist())) / 10)
        assert each.scores.tolist() == sorted(each.scores.tolist(), reverse=True)
        np.testing.assert_array_equal(each.scores, segment.exact_scores(query, each.rows))
    assert np.mean(shares) > {2: 0.80, 3: 0.88, 3.5: 0.90, 4: 0.92}[bits]


@pytest.mark.parametrize("pool_factor", [1, 2])
def test_chunks_and_merges_give_the_bytes_of_one_writing(tokens: Any, tmp_path: Path, pool_factor: int) -> None:
    codec = codec_of(tokens, clustering="tokens", pool_factor=pool_factor)
    whole = write(codec, tmp_path / "whole", tokens)
    write(codec, tmp_path / "chunked", tokens, chunk=7)
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "chunked")
    ends = np.append(0, np.cumsum(tokens.lengths))

    def rows(kept: NDArray[np.int64]) -> Any:
        places = np.concatenate([np.arange(ends[row], ends[row + 1]) for row in kept.tolist()])
        return type(tokens)(tokens.vectors[places], tokens.lengths[kept], tokens.token_ids[places])

    second = write(codec, tmp_path / "second", rows(np.arange(300, 500)))
    rng = np.random.default_rng(5)
    keep, rest = rng.random(500) < 0.4, rng.random(200) < 0.7
    (tmp_path / "merged").mkdir()
    holds = codec.merge([(whole, keep), (second, rest)], tmp_path / "merged", REAL)
    assert set(holds) == {path.name for path in (tmp_path / "merged").iterdir()}
    write(codec, tmp_path / "expected", rows(np.append(np.flatnonzero(keep), 300 + np.flatnonzero(rest))))
    assert bytes_of(tmp_path / "merged") == bytes_of(tmp_path / "expected")


@pytest.mark.parametrize("clustering", ["flat", "tokens", "two-level"])
def test_equal_input_gives_equal_bytes_and_a_saved_codec_writes_the_same(tokens: Any, tmp_path: Path, clustering: str) -> None:
    for name in ("a", "b"):
        codec = codec_of(tokens, clustering=clustering)
        (tmp_path / name).mkdir()
        assert set(codec.save(tmp_path / name, REAL)) == {path.name for path in (tmp_path / name).iterdir()}
        write(codec, tmp_path / f"s-{name}", tokens)
    opened = open_tokens(tmp_path / "a")
    (tmp_path / "c").mkdir()
    opened.save(tmp_path / "c", REAL)
    write(opened, tmp_path / "s-c", tokens)
    for name in ("b", "c"):
        assert bytes_of(tmp_path / name) == bytes_of(tmp_path / "a")
        assert bytes_of(tmp_path / f"s-{name}") == bytes_of(tmp_path / "s-a")
    assert dict(opened.parameters) == dict(codec.parameters)
    assert opened.parameters["clustering"] == clustering
    assert opened.preset_params("balanced", k=10) == codec.preset_params("balanced", k=10)


@pytest.mark.parametrize("damage", ["missing", "short", "long"])
@pytest.mark.parametrize("name", ["lengths.u32", "coarse.u8", "fine.u8"])
def test_a_file_of_another_size_is_damage(codec: AnyCodec, tokens: Any, tmp_path: Path, name: str, damage: str) -> None:
    write(codec, tmp_path / "s", tokens)
    path = tmp_path / "s" / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[:-1] if damage == "short" else content + b"\0\0\0\0")
    with pytest.raises(FileNotFoundError if damage == "missing" else DamagedIndexError):
        codec.open(Files(tmp_path / "s"), len(tokens.lengths))


def test_a_codec_of_single_coordinates_is_refused(codec: AnyCodec, tmp_path: Path) -> None:
    codec.save(tmp_path, REAL)
    described = json.loads((tmp_path / "codec.json").read_text())
    described["arrays"].remove("pairs.f32")
    (tmp_path / "codec.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match="written by an earlier version of Quiver; build the index again"):
        open_tokens(tmp_path)


def test_eight_codes_of_seven_bits_want_sixteen_coordinates(tokens: Any) -> None:
    card = replace(tokens.card, dim=24)
    check_settings({"bits": 4}, card)
    with pytest.raises(InputError, match=r"vectors of width 24; ivf-tokens takes multiples of 16 at 3\.5 bits up to 4,096"):
        check_settings({"bits": 3.5}, card)


def test_a_codec_without_its_description(codec: AnyCodec, tmp_path: Path) -> None:
    codec.save(tmp_path, REAL)
    (tmp_path / "codec.json").write_text('{"bits": 5}')
    with pytest.raises(InputError):
        open_tokens(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("groups.i64", np.array([0, 7, 5, 64])),
        ("groups.i64", np.array([0, 64, 128])),
        ("groups.i64", np.array([1, 64])),
        ("groups.i64", np.zeros(0, np.int64)),
        ("heads.f32", np.zeros((3, 32), np.float32)),
        ("codec.json", {"pool_factor": 0}),
        ("codec.json", {"dim": -32}),
        ("codec.json", {"dim": 12}),
        ("codec.json", {"bits": 5}),
        ("codec.json", {"vectors": None}),
    ],
)
def test_a_codec_whose_files_do_not_fit_each_other_is_damage(tokens: Any, tmp_path: Path, name: str, content: Any) -> None:
    """Groups say where the compiled loop reads: beyond the centroids there is other memory."""
    codec_of(tokens, clustering="two-level").save(tmp_path, REAL)
    path = tmp_path / name
    path.write_bytes(json.dumps(json.loads(path.read_text()) | content).encode() if isinstance(content, dict) else content.tobytes())
    with pytest.raises(DamagedIndexError):
        open_tokens(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bit": 4}, "has no setting 'bit' .did you mean 'bits'.*; it has bits, centroids, clustering, pool_factor"),
        ({"bits": 1}, "ivf-tokens: bits: must be 2, 3, 3.5 or 4, got 1"),
        ({"clustering": "fine"}, "clustering: must be one of tokens, two-level, flat; got 'fine'"),
        ({"centroids": 0}, "centroids: must be >= 1, got 0"),
        ({"pool_factor": 1.5}, "pool_factor: must be a whole number, got 1.5"),
        ({"pool_factor": True}, "pool_factor: must be a number, got true"),
    ],
)
def test_the_error_names_invalid_settings(tokens: Any, settings: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        train(tokens.sample, tokens.card, documents=1, vectors=1, settings=settings, seed=0)


def test_input_that_cannot_be_trained_on_is_refused(make_collection: Callable[..., Any], tokens: Any) -> None:
    odd = make_collection(5, width=12)
    with pytest.raises(InputError, match="width 12; ivf-tokens takes multiples of 8"):
        train(odd.sample, odd.card, documents=5, vectors=50, settings={}, seed=0)
    with pytest.raises(InputError, match=r"width 4104; ivf-tokens takes multiples of 8 up to 4,096"):
        check_settings({}, replace(tokens.card, dim=4104))
    without = Sample(tokens.vectors, tokens.lengths, None)
    with pytest.raises(InputError, match="does not report token ids"):
        train(without, tokens.card, documents=500, vectors=9000, settings={"clustering": "tokens"}, seed=0)


@pytest.mark.parametrize(
    ("search_params", "message"),
    [
        ({"efSearch": 4}, "has no search parameter 'efSearch'; it has nprobe, tokens_k, candidates, slack, exhaustive"),
        ({"nprobe": 0}, "nprobe: must be >= 1, got 0"),
        ({"slack": -1}, "slack: must be >= 0, got -1"),
        ({"slack": float("nan")}, "slack: must be >= 0, got nan"),
        ({"exhaustive": 1}, "exhaustive: must be true or false, got 1"),
        ({"candidates": True}, "candidates: must be a number, got true"),
    ],
)
def test_the_error_names_invalid_search_parameters(codec: AnyCodec, search_params: Mapping[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_params(codec, search_params)


def test_a_writer_refuses_vectors_that_do_not_fit(codec: AnyCodec, tokens: Any, tmp_path: Path) -> None:
    writer = codec.writer(tmp_path, REAL)
    with pytest.raises(ValueError, match="need the number of vectors of each document"):
        writer.add(tokens.vectors)
    with pytest.raises(ValueError, match="5 vectors of width 32 expected"):
        writer.add(tokens.vectors[:4], np.array([5]))
    with pytest.raises(ValueError, match="1 token ids for 4 vectors"):
        writer.add(tokens.vectors[:4], np.array([4]), tokens.token_ids[:1])


def test_the_number_of_threads_of_faiss_is_left_as_it_was(segment: TokenSegment, codec: AnyCodec, tokens: Any) -> None:
    former = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(3)
        segment.search(tokens.queries(1), 3, params=codec.preset_params("fast", k=3), ranks=tokens.ranks)
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(former)


@pytest.mark.parametrize("pool_factor", [1, 2])
def test_writing_stays_within_the_declared_memory(make_collection: Callable[..., Any], tmp_path: Path, pool_factor: int) -> None:
    tokens = make_collection(3000, width=64)
    codec = codec_of(tokens, pool_factor=pool_factor)
    write(codec, tmp_path / "warm", make_collection(50, width=64))
    (tmp_path / "s").mkdir()
    writer = codec.writer(tmp_path / "s", REAL)
    tracemalloc.start()
    try:
        writer.add(tokens.vectors, tokens.lengths, tokens.token_ids)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    writer.close()
    assert len(tokens.vectors) > 50_000
    assert peak < codec.memory(3000, len(tokens.vectors))
