"""The sizes of the Triton kernels' blocks."""

from __future__ import annotations


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number`` >= 1: blocks must have such a size.

    Example:
        >>> [power_of_two(number) for number in (1, 48, 64, 768)]
        [1, 64, 64, 1024]
    """
    return 1 << (number - 1).bit_length()


def blocks(number: int, size: int) -> int:
    """How many blocks of a size cover ``number``."""
    return -(-number // size)
