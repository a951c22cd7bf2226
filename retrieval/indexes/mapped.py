"""Arrays in files without a header: shape and type are the reader's knowledge, the checksum is in the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from retrieval.indexes.errors import DamagedIndexError, unreadable
from retrieval.indexes.mapping import map_file


def map_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file as an array, read-only: nothing is read until it is used.

    Args:
        path: The file, as ``write_array`` wrote it.
        dtype: Its type; it is little-endian in the file.
        shape: Its shape; -1 in the first place takes what the file holds.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedIndexError: It has another size.
        InputError: It cannot be read, for a reason that is not damage.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    try:
        size = path.stat().st_size
        if shape[0] == -1:
            row = stored.itemsize * int(np.prod(shape[1:]))
            shape = (size // max(row, 1), *shape[1:])
        if size != stored.itemsize * int(np.prod(shape)):
            raise DamagedIndexError(f"{path}: {size} bytes are not an array of shape {shape} and type {stored}; quiver index repair")
        return map_file(path, size).view(stored).reshape(shape) if size else np.zeros(shape, stored)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
