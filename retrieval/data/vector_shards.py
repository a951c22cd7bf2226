"""A shard: the vectors of some thousand texts in one file, written whole, with checksums over all that is read from it.

    one line of JSON, filled up with spaces to 512 bytes     how many texts, the width, the sha256 of the two parts below
    a record of 28 bytes for each text                       its key, how many rows it has, what tokenising did to it
    the vectors                                              float32, little-endian, the rows of text after text

A shard knows nothing of models. Its rows are read with plain reads or through a mapping that ends at once, so that the memory of a
reader does not grow with what it has read, nor the number of its open files with the number of shards.

Shapes: B texts, T rows of all texts, d vector width.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import replacing
from quiver.retrieval.cache import mark_used
from quiver.retrieval.data.text_keys import KEY, Keys
from quiver.retrieval.records import DenseVectors, TextTokens

FORMAT = "quiver-vectors"
SUFFIX = ".shard"
RECORD = np.dtype([("key", KEY), ("rows", "<i4"), ("tokens", "<i4"), ("truncated", "<u2"), ("empty", "<u2")])
_HEADER = 512
_BLOCK = 1 << 20
_FLOAT = np.dtype("<f4")


class DamagedError(Exception):
    """A shard is not what was written; the message says in what. Its texts have to be encoded again."""


@dataclass(frozen=True)
class Shard:
    """An opened shard: what it says of its texts is in memory, its vectors are in the file.

    Attributes:
        path: The file.
        records: A record of the type ``RECORD`` for each text, (B,).
        dim: Vector width d.
        vectors_sha256: Checksum of the vectors' bytes, which ``verify`` compares.
    """

    path: Path
    records: NDArray[np.void]
    dim: int
    vectors_sha256: str

    def __len__(self) -> int:
        return len(self.records)

    @property
    def rows(self) -> int:
        """Number of rows T."""
        return int(self.records["rows"].sum(dtype=np.int64))

    @property
    def _start(self) -> int:
        return _HEADER + self.records.nbytes

    def verify(self) -> None:
        """Read the vectors once and compare their checksum.

        Raises:
            DamagedError: They have changed or are gone.
        InputError: Too many files are open.
        """
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                file.seek(self._start)
                while block := file.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if digest.hexdigest() != self.vectors_sha256:
            raise DamagedError("its vectors have changed since they were written")

    def read(self, rows: NDArray[np.intp], out: DenseVectors) -> None:
        """Copy some rows out of the file.

        Args:
            rows: Their numbers in this shard, (n,).
            out: Takes them in the order given, (n, d), contiguous.

        Raises:
            InputError: The file is gone or cannot be read.
        """
        first, bytes_a_row = int(rows[0]), self.dim * _FLOAT.itemsize
        try:
            if rows[-1] - first == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
                with self.path.open("rb") as file:
                    file.seek(self._start + first * bytes_a_row)
                    whole = file.readinto(out.data.cast("B")) == out.nbytes
            else:
                whole = self.path.stat().st_size == self._start + self.rows * bytes_a_row
                if whole:
                    out[:] = np.memmap(self.path, _FLOAT, "r", self._start, (self.rows, self.dim))[rows]
            mark_used(self.path)  # a process that takes days keeps what it reads
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read any more ({error.strerror}); run it again") from error
        if not whole:
            raise InputError(f"{self.path}: cut short while it was in use; run it again")


def write_shard(path: Path, records: NDArray[np.void], vectors: Sequence[DenseVectors]) -> Shard:
    """Write a shard; it appears under its name when it is whole and on the disk.

    Args:
        path: The file.
        records: A record of the type ``RECORD`` for each text.
        vectors: The rows in parts of (n, d), text after text.

    Raises:
        InputError: It cannot be written.
    """
    parts = [np.ascontiguousarray(part, _FLOAT) for part in vectors]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.data)
    dim = parts[0].shape[1]
    fields = {"format": FORMAT, "texts": len(records), "dim": dim}
    fields |= {"records_sha256": hashlib.sha256(records.tobytes()).hexdigest(), "vectors_sha256": digest.hexdigest()}
    try:
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(json.dumps(fields).ljust(_HEADER - 1).encode("ascii") + b"\n")
            file.write(records.tobytes())
            for part in parts:
                file.write(part.data)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); make room, or name another folder for vectors") from error
    return Shard(path, records, dim, digest.hexdigest())


def open_shard(path: Path, dim: int) -> Shard:
    """Read all of a shard but its vectors.

    Args:
        path: The file.
        dim: The width d that its vectors must have.

    Raises:
        DamagedError: It is not a shard, or not the one that was written.
        InputError: Too many files are open.
    """
    try:
        with path.open("rb") as file:
            fields = _fields(file.read(_HEADER))
            records = np.frombuffer(file.read(int(fields["texts"]) * RECORD.itemsize), RECORD)
        shard = Shard(path, records, int(fields["dim"]), str(fields["vectors_sha256"]))
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"no readable header ({error})") from error
    if hashlib.sha256(records.tobytes()).hexdigest() != fields.get("records_sha256") or len(records) != fields["texts"]:
        raise DamagedError("its records have changed since they were written")
    if shard.dim != dim or size != shard._start + shard.rows * dim * _FLOAT.itemsize:
        raise DamagedError(f"{size} bytes are not {shard.rows} vectors of width {dim}")
    return shard


def _unreadable(path: Path, error: OSError) -> Exception:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return InputError(f"{path}: cannot be read ({error.strerror}); raise the limit, such as with ulimit -n 4096")
    return DamagedError(str(error.strerror))


def _fields(header: bytes) -> dict[str, Any]:
    fields = json.loads(header)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError("not a shard of vectors")
    return fields


def make_records(keys: Keys, lengths: Sequence[int], tokens: TextTokens) -> NDArray[np.void]:
    """The records of B texts from their keys, the number of rows of each, and what tokenising did."""
    records = np.zeros(len(keys), RECORD)
    records["key"], records["rows"], records["tokens"] = keys, lengths, tokens.tokens
    records["truncated"], records["empty"] = tokens.truncated, tokens.empty
    return records
