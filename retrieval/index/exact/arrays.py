"""Vectors looked at in blocks, so that no check copies them; and the ids that an index in memory is given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quiver.encoder.errors import InputError
from quiver.retrieval.protocols import Rows

ROWS = 8192
"""Rows of a matrix that are looked at in one step, so that a check never copies the matrix."""

BLOCK_BYTES = 128 << 20
"""Vectors that a search holds at a time where they are not in memory."""


def first_bad_row(rows: Rows) -> int | None:
    """Number of the first row that holds a NaN or an infinity, or None."""
    for start, block in rows.blocks(ROWS):
        bad = ~np.isfinite(block).all(axis=1)
        if bad.any():
            return start + int(bad.argmax())
    return None


def largest_norm(rows: Rows) -> float:
    """Length of the longest row; not finite where a row is not, or where a length does not fit into float32."""
    largest = np.float32(0)
    for _, block in rows.blocks(ROWS):
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.maximum(largest, np.linalg.norm(block, axis=1).max())
    return float(largest)


def block_rows(dim: int) -> int:
    """Rows of one block of a walk over vectors of width d: 128 MiB of them."""
    return max(1, BLOCK_BYTES // (4 * dim))


def check_new_ids(ids: Sequence[str], count: int) -> None:
    """Refuse ids that cannot name ``count`` documents.

    Raises:
        InputError: There are no documents, or an id is there twice.
        ValueError: The numbers of ids and of documents differ.
    """
    if len(ids) != count:
        raise ValueError(f"{len(ids)} ids for the vectors of {count} documents")
    if not count:
        raise InputError("an index needs at least one document, got none")
    seen: set[str] = set()
    for key in ids:
        if key in seen:
            raise InputError(f"document id '{key}' is there twice; ids must be unique")
        seen.add(key)
