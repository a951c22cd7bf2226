"""FAISS's own: files within limits and through the disk, and codecs that cannot be trained."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index.dense.faiss_engine import read_index
from quiver.retrieval.index.engines import Sample, find_engine
from quiver.retrieval.index.files import DamagedIndexError, Disk, Files


class FullDisk(Disk):
    """Has no room for what is written to files of one name."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def create(self, path: Path) -> Any:
        return Path("/dev/full").open("wb") if path.name.endswith(self.suffix) else super().create(path)


def train(documents: Any, factory: str, size: int) -> Any:
    sample = Sample(documents.vectors[:size])
    return find_engine("faiss-dense").train(sample, documents.card, documents=size, vectors=size, settings={"factory": factory}, seed=0)


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


def test_an_index_of_other_vectors_is_damage(documents: Any, dense: Any, tmp_path: Path) -> None:
    codec = train(documents, "Flat", 100)
    for name, count in (("few", 20), ("many", 700)):
        dense.write(codec, tmp_path / name, documents.vectors[:count])
    (tmp_path / "few" / "index.faiss").rename(tmp_path / "many" / "index.faiss")
    segment = codec.open(Files(tmp_path / "many"), 700)
    with pytest.raises(DamagedIndexError, match=r"20 vectors of width 16, expected \(700, 16\)"):
        segment.search(documents.queries(1), 2, params=codec.preset_params("balanced", k=2), ranks=documents.ranks)
