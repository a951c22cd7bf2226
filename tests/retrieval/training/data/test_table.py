"""Arrow files of texts: what was written is read back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quiver.retrieval.training.data.prepare import ArrowWriter, TextColumn

TEXTS = ["", "plain", "üñí 한국어 🎯", "two\nlines\r\n", "", "x" * 5000]


def written(folder: Path, texts: Sequence[str]) -> TextColumn:
    writer = ArrowWriter(folder / "texts.arrow")
    assert [writer.add(text.encode(), size=len(text)) for text in texts] == list(range(len(texts)))
    assert len(writer) == len(texts)
    writer.close()
    return TextColumn(folder / "texts.arrow")


def test_texts_are_read_back(tmp_path: Path) -> None:
    column = written(tmp_path, TEXTS)
    assert len(column) == len(TEXTS)
    assert list(column) == [column[number] for number in range(len(TEXTS))] == TEXTS
    assert column[1:4] == TEXTS[1:4]
    order = [5, 0, 2, 2, 4]
    assert column.take(order) == column.take(np.array(order)) == [TEXTS[number] for number in order]
    assert column.take([]) == []
    for number in (-1, len(TEXTS)):
        with pytest.raises(IndexError, match="text numbers must be 0 to 5"):
            column[number]


def test_texts_of_several_batches_are_read_back(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(10_000)]
    column = written(tmp_path, texts)
    order = np.random.default_rng(0).permutation(10_000)
    assert column.take(order) == [texts[number] for number in order.tolist()]
    assert list(column) == texts


def test_copies_hold_no_texts(tmp_path: Path) -> None:
    column = written(tmp_path, TEXTS)
    for again in (copy.deepcopy(column), pickle.loads(pickle.dumps(column))):  # noqa: S301  # made by this test
        assert list(again) == TEXTS
    assert len(pickle.dumps(column)) < 1000
