"""The files an index is made of: plain ``.npy`` arrays and a JSON list of ids. Nothing here can run code that a file holds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.protocols import Rows

IDS = "ids.json"
ROWS = 8192
"""Rows of a matrix that are looked at in one step, so that a check never copies the matrix."""

BLOCK_BYTES = 128 << 20
"""Vectors that a search holds at a time where they are not in memory."""


def write_ids(folder: Path, ids: Sequence[str]) -> None:
    """Write the document ids, in the order of their vectors."""
    (folder / IDS).write_text(json.dumps(list(ids), ensure_ascii=False), encoding="utf-8")


def read_ids(folder: Path) -> list[str]:
    """Read what ``write_ids`` wrote.

    Raises:
        InputError: The file is missing or is not a list of strings.
    """
    path = folder / IDS
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); build the index again") from error
    if not isinstance(ids, list) or not all(isinstance(key, str) for key in ids):
        raise InputError(f"{path}: not a list of ids; build the index again")
    return ids


def read_array(path: Path, dtype: type[np.generic], dimensions: int) -> NDArray[Any]:
    """Map an array into memory, read-only: nothing is read until it is used.

    Raises:
        InputError: The file is missing, cut short, or holds another type or number of dimensions.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: cannot be read ({error}); build the index again") from error
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != dimensions or not array.flags.c_contiguous:
        raise InputError(f"{path}: expected a {dimensions}-dimensional array of {dtype.__name__}; build the index again")
    return array


def write_rows(path: Path, rows: Rows) -> None:
    """Write rows as an array of ``.npy``, a block at a time; the bytes are those of ``np.save``."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": rows.shape})
        for _, block in rows.blocks(ROWS):
            file.write(np.ascontiguousarray(block, "<f4").data)


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
