"""A stream in pieces, for work that is done for many items at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")

BLOCK = 4096
"""Rows or texts that are handled together: enough for NumPy, and little memory even where a text has a megabyte."""


def blocks(items: Iterable[Item], size: int = BLOCK) -> Iterator[list[Item]]:
    """Items in lists of ``size``, the last one shorter; none empty.

    Example:
        >>> list(blocks("abcde", 2))
        [['a', 'b'], ['c', 'd'], ['e']]
    """
    stream = iter(items)
    while block := list(islice(stream, size)):
        yield block
