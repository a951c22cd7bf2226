"""Packed strings and id tables against Python's own lists, sorting and dicts."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from quiver.retrieval.index import strings
from quiver.retrieval.index.files import REAL, DamagedIndexError, Files
from quiver.retrieval.index.strings import IdTable, StringColumn, id_hashes, write_ids


def some_ids(seed: int) -> list[str]:
    """Ids that share prefixes, end in zeros, are empty, or are made of characters of several bytes."""
    rng = random.Random(seed)
    alphabet = "ab\0é漢𝄞" if seed % 2 else "ab"
    found = {"".join(rng.choice(alphabet) for _ in range(rng.choice([0, 1, 3, 7, 8, 9, 16, 20]))) for _ in range(rng.randrange(0, 60))}
    prefix = "doc-0000" * (seed % 3)
    return [prefix + key for key in sorted(found, key=lambda _: rng.random())]


@pytest.mark.parametrize("seed", range(40))
def test_strings_are_a_list_and_sort_as_python_sorts(seed: int) -> None:
    ids = some_ids(seed)
    packed = StringColumn.pack(ids)
    assert list(packed) == ids == packed[:]
    assert [packed[number] for number in range(-len(ids), len(ids))] == ids + ids
    assert [ids[row] for row in packed.order()] == sorted(ids)
    doubled = StringColumn.pack(ids + ids)
    assert [(ids + ids)[row] for row in doubled.order()] == sorted(ids + ids)
    chosen = np.array(random.Random(seed).choices(range(len(ids)), k=7) if ids else [], np.int64)
    assert list(packed.select(chosen)) == [ids[row] for row in chosen]
    with pytest.raises(IndexError, match=f"must be below {len(ids)}, got {len(ids)}"):
        packed[len(ids)]


def test_selecting_strings_holds_them_in_memory_once() -> None:
    """The position of a byte takes eight bytes: the positions of all bytes would take twenty times the memory of the strings."""
    packed = StringColumn.pack(f"https://example.org/{number:09d}/" * (number % 9) for number in range(30_000))
    chosen = np.random.default_rng(0).permutation(30_000)
    wanted = [packed[row] for row in chosen[:50].tolist()]
    assert list(packed.select(chosen[:50], part=10)) == wanted  # shorter than the strings
    tracemalloc.start()
    try:
        selected = packed.select(chosen, part=1 << 16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert list(selected)[:50] == wanted
    assert peak < 1.5 * len(packed.content) + 60 * 30_000


@pytest.mark.parametrize("seed", range(20))
def test_a_table_finds_every_row_and_ranks_every_id(tmp_path: Path, seed: int) -> None:
    ids = some_ids(seed)
    assert set(write_ids(tmp_path, StringColumn.pack(ids), REAL)) == {path.name for path in tmp_path.iterdir()}
    table = IdTable.open(Files(tmp_path), len(ids))
    assert table.rows_of([*ids, "no such id", *ids[:3]]).tolist() == [*range(len(ids)), -1, *range(len(ids[:3]))]
    assert [ids[row] for row in np.argsort(table.ranks)] == sorted(ids)
    assert list(table.strings) == ids


def test_ids_of_equal_hash_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strings, "id_hashes", lambda ids: id_hashes(ids) % np.uint64(3))
    ids = [f"d{number}" for number in range(50)]
    write_ids(tmp_path, StringColumn.pack(ids), REAL)
    table = IdTable.open(Files(tmp_path), 50)
    assert table.rows_of(ids[::-1]).tolist() == list(range(49, -1, -1))
    assert table.rows_of(["d50", "", "e"]).tolist() == [-1, -1, -1]


def test_hashes_are_the_same_on_every_machine() -> None:
    assert id_hashes(["a", "é"]).tolist() == [3405396810240292928, 3394012004367669963]


def test_files_that_do_not_fit_are_damage(tmp_path: Path) -> None:
    write_ids(tmp_path, StringColumn.pack(["a", "bb", "c"]), REAL)
    with pytest.raises(DamagedIndexError, match=r"ids\.offsets: 32 bytes are not an array of shape \(5,\)"):
        IdTable.open(Files(tmp_path), 4)
    (tmp_path / "ids.utf8").write_bytes(b"abb")
    with pytest.raises(DamagedIndexError, match=r"ids\.offsets: does not match 3 bytes of strings"):
        IdTable.open(Files(tmp_path), 3)
    (tmp_path / "ids.rows").unlink()
    (tmp_path / "ids.utf8").write_bytes(b"abbc")
    with pytest.raises(FileNotFoundError):
        IdTable.open(Files(tmp_path), 3)
