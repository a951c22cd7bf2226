"""Texts by a hash of their content: which of them are known, and under which number.

A dict of millions of entries takes gigabytes; sorted arrays take 24 bytes a text. They are kept as a few runs of which each is at
least twice as long as the next, so that adding n texts one chunk at a time costs n log n altogether and a look-up a binary search
in each run.

Shapes: B texts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

KEY = np.dtype("S16")
"""Type of a key: 16 bytes, ordered as bytes."""

Keys: TypeAlias = NDArray[np.bytes_]


def text_keys(texts: Sequence[str]) -> Keys:
    """A key for each text, (B,): the first 128 bits of its sha256, which no two texts share in practice."""
    # "surrogatepass": what is no text is the tokenizer's to refuse, with a better message than an encoding error.
    digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[: KEY.itemsize] for text in texts]
    return np.frombuffer(b"".join(digests), KEY)


class KeyTable:
    """Keys and their numbers; where a key was added twice, the first number counts."""

    def __init__(self) -> None:
        self._runs: list[tuple[Keys, NDArray[np.int64]]] = []

    def add(self, keys: Keys, numbers: NDArray[np.int64]) -> None:
        """Add B keys with their numbers."""
        if not len(keys):
            return
        order = np.argsort(keys, kind="stable")
        self._runs.append((keys[order], numbers[order]))
        while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
            newer, older = self._runs.pop(), self._runs.pop()
            keys, numbers = np.concatenate([older[0], newer[0]]), np.concatenate([older[1], newer[1]])
            order = np.argsort(keys, kind="stable")
            self._runs.append((keys[order], numbers[order]))

    def find(self, keys: Keys) -> NDArray[np.int64]:
        """The number of each key, (B,); -1 where the key is unknown."""
        found = np.full(len(keys), -1, np.int64)
        for known, numbers in self._runs:
            open_places = np.flatnonzero(found < 0)
            asked = keys[open_places]
            places = np.minimum(np.searchsorted(known, asked), len(known) - 1)
            same = known[places] == asked
            found[open_places[same]] = numbers[places[same]]
        return found

    def drop(self, first: int, last: int) -> None:
        """Forget the keys with the numbers ``first`` to ``last - 1``."""
        runs = []
        for keys, numbers in self._runs:
            kept = (numbers < first) | (numbers >= last)
            if kept.any():
                runs.append((keys[kept], numbers[kept]))
        self._runs = runs
