from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

from quiver.retrieval.training.data.strings import Strings, StringWriter, mapped_numbers

TEXTS = ["", "plain", "üñí 한국어 🎯", "two\nlines\r\n", "", "x" * 5000]


def written(folder: Path, texts: list[str]) -> Strings:
    writer = StringWriter(folder / "texts")
    assert [writer.add(text.encode()) for text in texts] == list(range(len(texts)))
    assert len(writer) == len(texts)
    writer.close()
    return Strings(folder / "texts")


def test_texts_come_back(tmp_path: Path) -> None:
    strings = written(tmp_path, TEXTS)
    assert len(strings) == len(TEXTS)
    assert [strings[number] for number in range(len(TEXTS))] == TEXTS
    order = [5, 0, 2, 2, 4]
    assert strings.take(order) == strings.take(np.array(order)) == [TEXTS[number] for number in order]
    assert strings.take([]) == []


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_nothing_to_map(tmp_path: Path, texts: list[str]) -> None:
    strings = written(tmp_path, texts)
    assert [strings[number] for number in range(len(strings))] == texts


def test_copies_hold_no_texts(tmp_path: Path) -> None:
    strings = written(tmp_path, TEXTS)
    for again in (copy.deepcopy(strings), pickle.loads(pickle.dumps(strings))):  # noqa: S301  # our own, from the line before
        assert again.take(range(len(TEXTS))) == TEXTS
    assert len(pickle.dumps(strings)) < 1000


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    written(tmp_path, TEXTS)
    with pytest.raises(FileExistsError):
        StringWriter(tmp_path / "texts")


def test_numbers_are_little_endian_and_read_only(tmp_path: Path) -> None:
    (tmp_path / "numbers").write_bytes(bytes([1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]))
    numbers = mapped_numbers(tmp_path / "numbers", np.int64)
    np.testing.assert_array_equal(numbers, [1, 256])
    with pytest.raises(ValueError, match="read-only"):
        numbers[0] = 3
