"""Whole files or none: numbered lines in with errors that say where, atomic writes and checksums out.

This module knows nothing of documents, runs or indexes. A path that ends in ``.gz`` is compressed, any other is plain.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from encoder.errors import InputError

_BLOCK = 1 << 20
_BOM = "\ufeff"


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""The lines of a UTF-8 text file with their numbers, blank lines left out.

    Lines end at ``\n`` or ``\r\n`` only: the other separators Unicode knows may stand inside a text. A byte order mark
    at the start is dropped, since it would become part of the first id.

    Yields:
        Line number from 1 and the line without its end.

    Raises:
        InputError: The file is missing, is not UTF-8 (names the line), is damaged gzip, or holds nothing but blank lines.
    """
    found = False
    number = 0
    try:
        with open_binary(path) as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8").rstrip("\r\n")
                if number == 1:
                    line = line.removeprefix(_BOM)
                if line.strip():
                    found = True
                    yield number, line
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line); convert the file") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip after line {number} ({error}); fetch the file again") from error
    if not found:
        raise InputError(f"{path}: the file is empty")


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """The objects of a JSON lines file, each with its place, ``file:line``.

    Raises:
        InputError: As `read_lines`; or a line is not a JSON object (names it).
    """
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: malformed JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{where}: expected a JSON object, got {type(row).__name__}")
        yield where, row


def open_binary(path: Path) -> BinaryIO:
    """Open a file for reading bytes, through gzip if its name ends in ``.gz``.

    Raises:
        InputError: There is no such file, or it may not be read.
    """
    try:
        return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears under its name only when it is whole and on the disk.

    The bytes go into a temporary file beside the target, which takes the target's name when the block ends without an
    error; otherwise it is removed and whatever the target held stays. Gzip output carries no time and no name, so that equal
    content gives equal bytes.

    Args:
        path: The target; its folder must exist, a file already there is replaced.

    Raises:
        InputError: The folder does not exist or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        raw = temporary.open("xb")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    yield cast(BinaryIO, packed)
            else:
                yield raw
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: without this a rename may be undone by a power cut."""
    if os.name == "nt":  # Windows cannot open a folder, and its file system journals renames itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
