"""One file of vectors: what was written is read, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import DamagedError, VectorShard, make_records, open_shard, text_keys, write_shard
from quiver.retrieval.records import TextTokens

TEXTS = ["a", "b c", "", "d e f"]
LENGTHS = [1, 2, 0, 3]
VECTORS = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


@pytest.fixture
def shard(tmp_path: Path) -> VectorShard:
    tokens = TextTokens(np.array([3, 4, 2, 70_000], np.int32), np.array([0, 0, 0, 1], bool), np.array([0, 0, 1, 0], bool))
    return write_shard(tmp_path / "000000-x.shard", make_records(text_keys(TEXTS), LENGTHS, tokens), [VECTORS[:1], VECTORS[1:]])


def test_it_comes_back_as_it_was_written(shard: VectorShard) -> None:
    opened = open_shard(shard.path, 5)
    opened.verify()
    assert (len(opened), opened.rows, opened.dim) == (4, 6, 5)
    assert opened.records["key"].tobytes() == text_keys(TEXTS).tobytes()
    assert opened.records["rows"].tolist() == LENGTHS
    assert opened.records["tokens"].tolist() == [3, 4, 2, 70_000]
    assert opened.records["truncated"].tolist() == [0, 0, 0, 1]
    assert opened.records["empty"].tolist() == [0, 0, 1, 0]
    for rows in ([0, 1, 2, 3, 4, 5], [2, 3], [5], [4, 0, 0, 3], [3, 2], [0, 5, 1]):
        out = np.empty((len(rows), 5), np.float32)
        opened.read(np.array(rows), out)
        np.testing.assert_array_equal(out, VECTORS[rows])


def test_no_byte_may_change(shard: VectorShard) -> None:
    """Every single byte of the file, spaces that fill up the header excepted, is under a checksum or a comparison."""
    content = shard.path.read_bytes()
    padding = range(len(content[:512].rstrip()), 511)
    unseen = []
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x10
        shard.path.write_bytes(changed)
        try:
            open_shard(shard.path, 5).verify()
        except DamagedError:
            continue
        unseen.append(place)
    # 0x20 ^ 0x10 is "0": behind a JSON object even that is an error.
    assert set(unseen) <= set(padding)
    assert len(content) == 512 + 4 * 28 + 6 * 20


@pytest.mark.parametrize("kept", [0, 1, 100, 511, 512, 600, 624, 700, 743])
def test_a_file_cut_short_is_damaged(shard: VectorShard, kept: int) -> None:
    content = shard.path.read_bytes()
    assert len(content) == 744
    shard.path.write_bytes(content[:kept])
    with pytest.raises(DamagedError):
        open_shard(shard.path, 5)
    shard.path.write_bytes(content + b"\0")
    with pytest.raises(DamagedError, match="745 bytes"):
        open_shard(shard.path, 5)


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b'{"format": "other"}', b'{"format": "quiver-vectors"}', b"\xff\xfe"])
def test_what_is_no_shard_is_damaged(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x.shard").write_bytes(header.ljust(512))
    with pytest.raises(DamagedError, match="no readable header"):
        open_shard(tmp_path / "x.shard", 5)
    with pytest.raises(DamagedError, match="No such file"):
        open_shard(tmp_path / "y.shard", 5)


def test_another_width_is_damaged(shard: VectorShard) -> None:
    with pytest.raises(DamagedError, match="width 6"):
        open_shard(shard.path, 6)


def test_what_vanishes_while_it_is_in_use_is_said_in_one_line(shard: VectorShard) -> None:
    out = np.empty((2, 5), np.float32)
    shard.path.write_bytes(shard.path.read_bytes()[:-1])
    for rows in ([4, 5], [5, 4]):
        with pytest.raises(InputError, match=r"000000-x\.shard: was truncated while in use; run the command again"):
            shard.read(np.array(rows), out)
    shard.path.unlink()
    for rows in ([0, 1], [5, 4]):
        with pytest.raises(InputError, match=r"000000-x\.shard: can no longer be read \(No such file"):
            shard.read(np.array(rows), out)


def test_a_folder_that_cannot_be_written(tmp_path: Path, shard: VectorShard) -> None:
    with pytest.raises(InputError, match="does not exist"):
        write_shard(tmp_path / "nowhere" / "x.shard", shard.records, [VECTORS])
