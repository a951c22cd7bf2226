"""FAISS's own: files within limits and through the disk, and codecs that cannot be trained."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index.dense.faiss_engine import index_bytes, read_index, write_index
from quiver.retrieval.index.engines import Sample, find_engine
from quiver.retrieval.index.files import REAL, DamagedIndexError, Disk, Files


class FullDisk(Disk):
    """Has no room for what is written to files of one name."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def create(self, path: Path) -> Any:
        return Path("/dev/full").open("wb") if path.name.endswith(self.suffix) else super().create(path)


def train(documents: Any, factory: str, size: int) -> Any:
    sample = Sample(documents.vectors[:size])
    return find_engine("faiss-dense").train(sample, documents.card, documents=size, vectors=size, settings={"factory": factory}, seed=0)


def test_an_index_is_written_and_read(tmp_path: Path, documents: Any) -> None:
    index = faiss.index_factory(16, "IVF8,SQ8", faiss.METRIC_INNER_PRODUCT)
    index.train(documents.vectors)
    index.add(documents.vectors)
    write_index(index, tmp_path / "i.faiss", REAL)
    content = np.fromfile(tmp_path / "i.faiss", np.uint8)
    np.testing.assert_array_equal(content, faiss.serialize_index(index))
    assert index_bytes(index) == len(content)
    again = read_index(content, tmp_path / "i.faiss")
    np.testing.assert_array_equal(faiss.serialize_index(again), content)
    for size in range(0, len(content), 997):
        with pytest.raises(DamagedIndexError, match=r"i\.faiss: FAISS cannot read it"):
            read_index(content[:size], tmp_path / "i.faiss")


@pytest.mark.skipif(not hasattr(faiss, "set_deserialization_vector_byte_limit"), reason="this version of FAISS has no limits")
def test_a_part_larger_than_its_file_is_refused(documents: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index = faiss.index_factory(16, "Flat", faiss.METRIC_INNER_PRODUCT)
    index.add(documents.vectors)
    content = faiss.serialize_index(index)
    large = content.copy()
    place = large.tobytes().index((16 * len(documents.vectors)).to_bytes(8, "little"))
    large[place : place + 8] = np.frombuffer((1 << 33).to_bytes(8, "little"), np.uint8)
    limit = faiss.get_deserialization_vector_byte_limit()
    with pytest.raises(DamagedIndexError) as caught:
        read_index(large, Path("i.faiss"))
    assert "limit" in str(caught.value.__cause__)
    assert faiss.get_deserialization_vector_byte_limit() == limit
    monkeypatch.delattr(faiss, "set_deserialization_vector_byte_limit")  # as older versions are
    np.testing.assert_array_equal(faiss.serialize_index(read_index(content, Path("i.faiss"))), content)


@pytest.mark.parametrize("suffix", ["index.faiss", "fine.i8", "scales.f32"])
def test_a_full_disk_is_the_disks_error(tmp_path: Path, documents: Any, suffix: str) -> None:
    codec = train(documents, "Flat", 100)
    with pytest.raises(OSError, match="No space") as caught:
        fill(codec.writer(tmp_path, FullDisk(suffix)), documents.vectors)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("suffix", ["coarse.u8", "fine.i8"])
def test_a_full_disk_is_the_disks_error_for_lists_too(tmp_path: Path, documents: Any, suffix: str) -> None:
    with pytest.raises(OSError, match="No space"):
        fill(documents.codec("pq").writer(tmp_path, FullDisk(suffix)), documents.vectors)


def fill(writer: Any, vectors: Any) -> None:
    writer.add(vectors)
    writer.close()


@pytest.mark.parametrize(
    ("factory", "size", "message"),
    [
        ("IVF64,Flat", 50, "index 'IVF64,Flat': FAISS cannot train it on 50 vectors"),
        ("IDMap,Flat", 50, "index 'IDMap,Flat': FAISS cannot add vectors to it"),
    ],
)
def test_indexes_that_cannot_be_trained_or_added_to_are_refused(documents: Any, factory: str, size: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        train(documents, factory, size)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_codec_is_trained_on_decoded_vectors(documents: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quiver.retrieval"):
        train(documents, "IVF8,Flat", 800)
    assert "index 'IVF8,Flat': training on 800 of 800 vectors" in caplog.text


def test_an_index_of_other_vectors_is_damage(documents: Any, dense: Any, tmp_path: Path) -> None:
    codec = train(documents, "Flat", 100)
    for name, count in (("few", 20), ("many", 700)):
        dense.write(codec, tmp_path / name, documents.vectors[:count])
    (tmp_path / "few" / "index.faiss").rename(tmp_path / "many" / "index.faiss")
    segment = codec.open(Files(tmp_path / "many"), 700)
    with pytest.raises(DamagedIndexError, match=r"20 vectors of width 16, expected \(700, 16\)"):
        segment.search(documents.queries(1), 2, params=codec.preset_params("balanced", k=2), ranks=documents.ranks)


def test_an_opened_index_stays_readable(documents: Any, dense: Any, tmp_path: Path) -> None:
    """A writer may remove the files of an old state while somebody who has not searched yet has it open."""
    codec = train(documents, "HNSW8,Flat", 100)
    segment = dense.write(codec, tmp_path / "s", documents.vectors)
    for path in (tmp_path / "s").iterdir():
        path.unlink()
    (found,) = segment.search(documents.vectors[:1], 2, params=codec.preset_params("balanced", k=2), ranks=documents.ranks)
    assert len(found.rows) == 2
