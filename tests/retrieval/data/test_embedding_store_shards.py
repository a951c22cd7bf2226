"""A shard, an Arrow file: vectors are read as written, and damage is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import DamagedError, VectorShard, make_records, open_shard, text_keys, write_shard
from quiver.retrieval.records import ModelCard, TextTokens

TEXTS = ["a", "b c", "", "d e f"]
LENGTHS = {"dense": [1, 1, 1, 1], "colbert": [1, 2, 0, 3]}
TOKENS = TextTokens(np.array([3, 4, 2, 70_000], np.int32), np.array([0, 0, 0, 1], bool), np.array([0, 0, 1, 0], bool))
VECTORS = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
COLBERT = ModelCard("m", "colbert", "a" * 64, 5, "maxsim", 9, 9)
DENSE = replace(COLBERT, kind="dense", similarity="dot")
CARDS = {"dense": DENSE, "colbert": COLBERT}


def written(folder: Path, kind: str) -> VectorShard:
    lengths = LENGTHS[kind]
    rows = VECTORS[: sum(lengths)]
    write_shard(folder / "000000-x.arrow", make_records(text_keys(TEXTS), lengths, TOKENS), rows, CARDS[kind])
    return open_shard(folder / "000000-x.arrow", CARDS[kind])


@pytest.fixture
def shard(tmp_path: Path) -> VectorShard:
    return written(tmp_path, "colbert")


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_a_shard_is_read_as_it_was_written(tmp_path: Path, kind: str) -> None:
    opened, count = written(tmp_path, kind), sum(LENGTHS[kind])
    opened.verify()
    assert (len(opened), opened.rows, opened.dim) == (4, count, 5)
    assert opened.records["key"].tobytes() == text_keys(TEXTS).tobytes()
    assert opened.records["rows"].tolist() == LENGTHS[kind]
    assert opened.records["tokens"].tolist() == [3, 4, 2, 70_000]
    assert opened.records["truncated"].tolist() == [0, 0, 0, 1]
    assert opened.records["empty"].tolist() == [0, 0, 1, 0]
    for rows in (list(range(count)), [2, 3], [count - 1], [3, 0, 0, 2], [3, 2], [0, count - 1, 1]):
        out = np.empty((len(rows), 5), np.float32)
        opened.read(np.array(rows), out)
        np.testing.assert_array_equal(out, VECTORS[rows])


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_any_arrow_reader_opens_a_shard(tmp_path: Path, kind: str) -> None:
    batch = pa.ipc.open_file(written(tmp_path, kind).path).read_all()
    assert batch.column_names == ["key", "tokens", "truncated", "empty", "vectors"]
    assert batch["key"].to_pylist() == [bytes(key) for key in text_keys(TEXTS)]
    ends = np.cumsum(LENGTHS[kind])
    expected = [VECTORS[end - length : end].tolist() for end, length in zip(ends, LENGTHS[kind], strict=True)]
    assert batch["vectors"].to_pylist() == ([rows[0] for rows in expected] if kind == "dense" else expected)


def test_a_shard_without_vectors_is_read(tmp_path: Path) -> None:
    path = tmp_path / "empty.arrow"
    write_shard(path, make_records(text_keys(["", " "]), [0, 0], TextTokens(*(np.zeros(2, kind) for kind in "i??"))), VECTORS[:0], COLBERT)
    opened = open_shard(path, COLBERT)
    opened.verify()
    assert (len(opened), opened.rows) == (2, 0)


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_a_changed_byte_is_found_or_changes_nothing(tmp_path: Path, kind: str) -> None:
    """The bytes without effect are padding and metadata that Arrow readers ignore."""
    shard = written(tmp_path, kind)
    content, changed_nothing = shard.path.read_bytes(), 0
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        shard.path.write_bytes(changed)
        try:
            opened = open_shard(shard.path, CARDS[kind])
            opened.verify()
        except DamagedError:
            continue
        changed_nothing += 1
        assert opened.records.tobytes() == shard.records.tobytes()
        out = np.empty((shard.rows, 5), np.float32)
        opened.read(np.arange(shard.rows), out)
        np.testing.assert_array_equal(out, VECTORS[: shard.rows])
    assert changed_nothing < 0.8 * len(content)


def test_every_byte_of_the_vectors_is_under_the_checksum(shard: VectorShard) -> None:
    content = shard.path.read_bytes()
    assert content[shard.vectors_start :].startswith(VECTORS.tobytes())
    for place in range(shard.vectors_start, shard.vectors_start + VECTORS.nbytes):
        changed = bytearray(content)
        changed[place] ^= 0x10
        shard.path.write_bytes(changed)
        with pytest.raises(DamagedError, match="its vectors have changed"):
            open_shard(shard.path, COLBERT).verify()


def test_a_truncated_file_is_damaged(shard: VectorShard) -> None:
    content = shard.path.read_bytes()
    for kept in range(0, len(content), 7):
        shard.path.write_bytes(content[:kept])
        with pytest.raises(DamagedError):
            open_shard(shard.path, COLBERT)


@pytest.mark.parametrize("content", [b"", b"{", b"ARROW1", b"ARROW1\0\0" * 100, b"\xff\xfe"])
def test_another_file_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.arrow").write_bytes(content)
    with pytest.raises(DamagedError, match="not readable as a shard"):
        open_shard(tmp_path / "x.arrow", COLBERT)
    with pytest.raises(DamagedError, match="No such file"):
        open_shard(tmp_path / "y.arrow", COLBERT)


def test_an_arrow_file_of_another_origin_is_damaged(tmp_path: Path) -> None:
    table = pa.table({"key": [b"0" * 16]})
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DamagedError, match="not readable as a shard"):
        open_shard(tmp_path / "x.arrow", COLBERT)


@pytest.mark.parametrize("card", [replace(COLBERT, dim=6), DENSE])
def test_vectors_of_another_width_or_kind_are_damaged(shard: VectorShard, card: ModelCard) -> None:
    with pytest.raises(DamagedError, match=f"not a shard of {card.kind} vectors of width {card.dim}"):
        open_shard(shard.path, card)


def test_a_file_that_vanishes_in_use_is_reported_in_one_line(shard: VectorShard) -> None:
    out = np.empty((2, 5), np.float32)
    shard.path.write_bytes(shard.path.read_bytes()[: shard.vectors_start + 100])
    for rows in ([4, 5], [5, 4]):
        with pytest.raises(InputError, match=r"000000-x\.arrow: was truncated while in use; run the command again"):
            shard.read(np.array(rows), out)
    shard.path.unlink()
    for rows in ([0, 1], [5, 4]):
        with pytest.raises(InputError, match=r"000000-x\.arrow: can no longer be read \(No such file"):
            shard.read(np.array(rows), out)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, shard: VectorShard) -> None:
    with pytest.raises(InputError, match="does not exist"):
        write_shard(tmp_path / "nowhere" / "x.arrow", shard.records, VECTORS, COLBERT)
