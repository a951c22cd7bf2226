"""The table of text keys, compared with a dict."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from quiver.retrieval.data.embedding_store import KEY, KeyTable, text_keys


def test_a_key_is_the_first_half_of_the_sha256_of_the_text() -> None:
    texts = ["", "a", "é", "\0", "a" * 10_000]
    keys = text_keys(texts)
    assert keys.dtype == KEY
    raw = keys.tobytes()
    assert [raw[16 * row : 16 * row + 16] for row in range(5)] == [hashlib.sha256(text.encode()).digest()[:16] for text in texts]
    assert len(text_keys([])) == 0


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_key_table_behaves_as_a_dict_that_keeps_the_first_entry(chunk: int) -> None:
    rng = np.random.default_rng(chunk)
    texts = [f"text {number}" for number in rng.integers(0, 600, 1000)]
    table = KeyTable()
    expected: dict[str, int] = {}
    table.add(text_keys([]), np.arange(0))
    for start in range(0, 1000, chunk):
        part = texts[start : start + chunk]
        table.add(text_keys(part), np.arange(start, start + len(part)))
        for number, text in enumerate(part, start=start):
            expected.setdefault(text, number)
    asked = [f"text {number}" for number in range(700)]
    assert table.find(text_keys(asked)).tolist() == [expected.get(text, -1) for text in asked]
    # What is dropped gives way to a later number of the same text, or is gone.
    table.drop(200, 500)
    later: dict[str, int] = {}
    for number, text in enumerate(texts):
        if not 200 <= number < 500:
            later.setdefault(text, number)
    assert table.find(text_keys(asked)).tolist() == [later.get(text, -1) for text in asked]
    table.drop(0, 1000)
    assert (table.find(text_keys(asked)) == -1).all()


def test_keys_that_end_in_zero_bytes_are_distinguished() -> None:
    keys = np.frombuffer(b"".join((bytes([1]) + bytes(15), bytes([1, 1]) + bytes(14), bytes(15) + bytes([1]), bytes(16))), KEY)
    table = KeyTable()
    table.add(keys[:3], np.arange(3))
    assert table.find(keys).tolist() == [0, 1, 2, -1]
