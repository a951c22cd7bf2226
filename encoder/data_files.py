"""Whole files or none: numbered lines in with errors that say where, atomic writes and checksums out.

This module knows nothing of documents, runs or indexes. A path that ends in ``.gz`` is compressed, any other is plain.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, replacing

_BLOCK = 1 << 20
_BOM = "\ufeff"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


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
    for number, text in _decoded(path):
        line = text.rstrip("\r\n")
        if line.strip():
            found = True
            yield number, line
    if not found:
        raise InputError(f"{path}: the file is empty")


def read_whole(path: Path) -> str:
    """A UTF-8 text file, ends of lines as they are; a byte order mark at the start is dropped.

    Raises:
        InputError: The file is missing, is not UTF-8 (names the line), or is damaged gzip.
    """
    return "".join(text for _, text in _decoded(path))


def _decoded(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their ends; decoded one by one, so that a broken byte has its line."""
    number = 0
    try:
        with open_binary(path) as file:
            for number, raw in enumerate(file, start=1):
                text = raw.decode("utf-8")
                yield number, text.removeprefix(_BOM) if number == 1 else text
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start} of the line); convert the file") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip after line {number} ({error}); fetch the file again") from error


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """The objects of a JSON lines file with their line numbers.

    Raises:
        InputError: As `read_lines`; or a line is not a JSON object, or holds half of an escaped surrogate pair, which is legal
            JSON and no text: tokenizers and files fail on it much later. Names file and line.
    """
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: malformed JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
        if _SURROGATE_ESCAPE.search(line):
            _check_encodable(row, f"{path}:{number}")
        yield number, row


def _check_encodable(row: dict[str, object], where: str) -> None:
    for name, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"{where}: '{name}' holds an unpaired surrogate") from error


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
    with replacing(path) as temporary, temporary.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                yield cast(BinaryIO, packed)
        else:
            yield raw


def cache_folder(name: str) -> Path:
    """Where downloads and vectors are kept between runs: ``$QUIVER_CACHE/name``, or ``name`` under the user's cache folder.

    Args:
        name: What is kept there, such as ``vectors``.

    Returns:
        The folder; it may not exist yet.

    Raises:
        InputError: No home folder is known, or not that of the user whom ``QUIVER_CACHE`` or ``XDG_CACHE_HOME`` names.
    """
    if root := os.environ.get("QUIVER_CACHE"):
        return expand_home(root) / name
    return expand_home(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "quiver" / name


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal, read in blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
