"""Functions compiled by numba, and kept on disk where that is possible.

numba keeps what it has compiled until the file of the function changes; what a function calls may stand in another file. So the name
under which it is kept says what the function's whole folder looked like.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from pickle import UnpicklingError  # the error alone: numba unpickles what it has kept
from threading import Lock
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

from encoder.processor import has_amx

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# What reading a file that numba has kept raises where it was cut short or is something else; numba reads with pickle.
_UNREADABLE = (UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)


def compiled(function: Function, *, reordered: bool = False) -> Function:
    """The function compiled when it is first called, and kept on disk where that is possible.

    Args:
        function: What is compiled.
        reordered: Its sums may be taken in another order than it says, as vectors of numbers want them; with contiguous arrays it is the
            same one in every call.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"} if reordered else False}
    return cast(Function, _kept(numba.njit(cache=True, **options), numba.njit(**options), function))


class Callback:
    """``function(pointer)`` as C would call it, compiled when its address is first wanted.

    It runs without Python: it raises nothing, and what the pointer points to must outlive the call.

    Args:
        function: What is compiled.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._lock = Lock()

    @cached_property
    def _compiled(self) -> Any:
        signature = "void(voidptr)"
        return _kept(numba.cfunc(signature, cache=True), numba.cfunc(signature), self._function)

    @property
    def address(self) -> int:
        """Where the compiled function begins."""
        with self._lock:
            address: int = self._compiled.address
            return address


def _kept(keep: Callable[[Any], Any], plain: Callable[[Any], Any], function: Callable[..., Any]) -> Any:
    # Whether the system lets a process have AMX is nothing that numba knows.
    function.__qualname__ += f"_{_digest(Path(function.__code__.co_filename).parent)}{'_amx' * has_amx()}"
    if not keeps_code():
        return plain(function)
    try:
        found = keep(function)
    except _UNREADABLE as error:  # a callback is loaded here
        _forget(FunctionCache(function), function, error)
        return keep(function)
    except RuntimeError as error:  # this one's folder cannot be written, though another could
        logger.warning("%s is compiled again in every process (%s)", function.__name__, error)
        return plain(function)
    _load_anew(found, function)
    return found


def _load_anew(dispatcher: Any, function: Callable[..., Any]) -> None:
    """Make a function that is loaded at its first call compile again where what was kept of it cannot be read."""
    kept = getattr(dispatcher, "_cache", None)
    if kept is None or not hasattr(kept, "load_overload"):  # another numba: what is damaged ends the run, as it would without this
        return
    load = kept.load_overload

    def load_overload(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except _UNREADABLE as error:
            _forget(kept, function, error)
            return None  # numba compiles it, and keeps that

    kept.load_overload = load_overload


def _forget(kept: Any, function: Callable[..., Any], error: Exception) -> None:
    logger.warning("the compiled code of %s cannot be read (%s) and is compiled again", function.__name__, error or type(error).__name__)
    kept.flush()


@cache
def keeps_code() -> bool:
    """Whether compiled code can be kept on disk; said once where not.

    Compiling takes seconds in every process otherwise, more than most work gains, so that the uncompiled path is taken. Where numba finds
    no folder that it may write to, a private one for temporary files serves.
    """
    if _finds_folder():
        return True
    folder = _private_folder()
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
        if _finds_folder():
            logger.warning("compiled code is kept in %s, since no other folder can be written; NUMBA_CACHE_DIR names another", folder)
            return True
    logger.warning("compiled code cannot be kept, and so nothing is compiled, which is slower; set NUMBA_CACHE_DIR to a folder to write to")
    return False


def _finds_folder() -> bool:
    try:
        FunctionCache(_finds_folder)
    except RuntimeError:
        return False
    return True


def _private_folder() -> Path | None:
    """A folder for temporary files that nobody else can write to, for what is loaded from it runs; None where there is none."""
    if not hasattr(os, "getuid"):
        return None
    try:
        folder = Path(tempfile.gettempdir()) / f"quiver-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    is_private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if is_private else None


@cache
def _digest(folder: Path) -> str:
    """What tells one state of a folder's modules from another."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]
