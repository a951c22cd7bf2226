from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from quiver.retrieval.training.data.lookup import IdTable, IdWriter

HASHES: dict[str, Callable[[str], int]] = {"good": hash, "always equal": lambda key: 7, "few": lambda key: len(key) - 2}


def table(folder: Path, ids: Sequence[str], hashed: Callable[[str], int] = hash) -> IdTable:
    writer = IdWriter(folder / "ids", hashed=hashed)
    for key in ids:
        writer.add(key, key.encode())
    return writer.table()


@pytest.mark.parametrize("hashed", HASHES.values(), ids=HASHES)
def test_ids_are_found_whatever_their_hashes(tmp_path: Path, hashed: Callable[[str], int]) -> None:
    rng = np.random.default_rng(0)
    ids = [f"{'x' * (number % 5)}{number}" for number in rng.permutation(300).tolist()]
    found = table(tmp_path, ids, hashed)
    assert len(found) == 300
    asked = rng.integers(0, 300, 1000).tolist()
    np.testing.assert_array_equal(found.find([ids[number] for number in asked]), asked)
    np.testing.assert_array_equal(found.find(["nobody", ids[3], "", "x"]), [-1, 3, -1, -1])
    assert found.find([]).shape == (0,)
    assert list(found.repeated()) == []


@pytest.mark.parametrize("hashed", HASHES.values(), ids=HASHES)
def test_repetitions_are_told_from_collisions(tmp_path: Path, hashed: Callable[[str], int]) -> None:
    found = table(tmp_path, ["a", "b", "a", "c", "b", "a"], hashed)
    assert sorted(found.repeated()) == [(0, 2), (0, 5), (1, 4)]
    np.testing.assert_array_equal(found.find(["a", "b", "c", "d"]), [0, 1, 3, -1])


def test_an_empty_table(tmp_path: Path) -> None:
    found = table(tmp_path, [])
    np.testing.assert_array_equal(found.find(["a"]), [-1])
    assert list(found.repeated()) == []
