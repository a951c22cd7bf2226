"""The error class for mistakes that the user can correct: in a file, an option, a checkpoint or a recipe.

The command line turns it into one line on standard error and exit status 2; every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType


class InputError(ValueError):
    """Invalid input from the caller; the message says what is wrong, where, and what to do.

    Example:
        >>> from quiver import InputError
        >>> try:
        ...     raise InputError("corpus.csv:7: the field 'id' is blank")
        ... except ValueError as error:
        ...     print(error)
        corpus.csv:7: the field 'id' is blank
    """


class EmptyInputError(InputError):
    """There is nothing to read: a file is empty, or a folder has no files that are read."""


class RunStoppedError(Exception):
    """A session ended after a number of steps, before the last one, because a signal requested it; a checkpoint was saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, with a checkpoint")
        self.step = step


def first_line(error: object) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Of a disk that fails or has become read-only, without a mistake in the path.
_FAILED = (errno.EIO, errno.EROFS)


def full_disk(error: BaseException) -> OSError | None:
    """Return the error of a full disk, an exhausted quota or a limit on file sizes that is, or was raised as, this error; else None."""
    cause = system_error(error)
    return cause if cause is not None and cause.errno in _FULL else None


def describe_failure(error: Exception) -> str:
    """Say in one line what failed: for a full disk what cannot be written, where, why, how much room is left and what to do."""
    full = full_disk(error)
    if full is not None:
        name = full.filename2 or full.filename
        where = Path(os.fsdecode(name)) if isinstance(name, str | bytes | Path) else None  # some name a descriptor
        room = "" if where is None else f"; {_describe_room(where)}"
        if error is not full:
            return f"{error}{room}"
        what = where or "a file or standard output"
        return f"{what}: cannot be written ({os.strerror(full.errno or 0)}{room}); free space and repeat the command"
    if isinstance(error, OSError) and error.errno in _FAILED and isinstance(error.filename, str | Path):
        return f"{error.filename}: cannot be read or written ({os.strerror(error.errno)})"
    return str(error)


def _describe_room(path: Path) -> str:
    """The free space, or the lack of room for further files, of the disk that holds a path."""
    try:
        folder = next(each for each in path.absolute().parents if each.is_dir())
        if hasattr(os, "statvfs") and (counts := os.statvfs(folder)).f_files and not counts.f_favail:
            return "no room for further files on its disk"
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB free on its disk"
    except OSError as problem:
        return f"its disk cannot be examined: {problem.strerror}"


def import_for(purpose: str, module: str, install: str) -> ModuleType:
    """Import a module that only some tasks need, or raise InputError: ``purpose`` needs it, pip ``install``s it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(f"{purpose} needs {module.partition('.')[0].replace('_', '-')}: pip install {install}") from error


_CLIENT_ERRORS = {
    "httpx": ("HTTPError",),
    "aiohttp": ("ClientError",),
    "datasets": ("DatasetsError",),
    "huggingface_hub.errors": ("XetDownloadError", "RevisionResolutionError", "EntryNotFoundError"),
}


def download_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the errors that a download may raise: OSError, RuntimeError (of hf_xet), those of the clients that are loaded, and more.

    The clients share no base class. The Hub's client up to version 0.x uses requests, whose errors are OSErrors; from 1.0 on it uses
    httpx, whose errors are not. Later versions of hf_xet have an error of their own.
    """
    if "huggingface_hub" in sys.modules:
        importlib.import_module("huggingface_hub.errors")
    found = (getattr(sys.modules.get(module), name, None) for module, names in _CLIENT_ERRORS.items() for name in names)
    return (OSError, RuntimeError, *more, *(each for each in found if isinstance(each, type) and issubclass(each, Exception)))


def system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the operating system behind an error, such as a full disk behind one that a writer raised; else None."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error
