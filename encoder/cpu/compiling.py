"""Functions compiled by numba, and kept on disk where that is possible.

numba keeps what it has compiled until the file of the function changes; what a function calls may stand in another file. So the name
under which it is kept says what the function's whole folder looked like.

numba takes the files of its cache as they are. Here each ends with a checksum of what is before it: a file that is truncated or damaged is
deleted and written anew, and nothing of it is unpickled or executed. A file that cannot be written costs a warning, and not the run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar, cast

import numba
from numba.core import caching

from quiver.encoder.cpu.processor import has_amx

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Goes into the names of files; another one where what stands in them changes.
_LAYOUT = b"checksums/1"


def compiled(function: Function, *, reordered: bool = False) -> Function:
    """The function compiled when it is first called, and kept on disk where that is possible.

    Args:
        function: What is compiled.
        reordered: Its sums may be taken in another order than it says, as vectors of numbers want them; with contiguous arrays it is the
            same one in every call.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"} if reordered else False}
    return cast(Function, _kept(numba.njit(**options), function))


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
        # numba.cfunc compiles at once, before a cache could be put in: these are the lines of it that make the object.
        from numba.core.ccallback import CFunc
        from numba.core.sigutils import normalize_signature

        made = _kept(lambda function: CFunc(function, normalize_signature("void(voidptr)"), locals={}, options={}), self._function)
        made.compile()
        return made

    @property
    def address(self) -> int:
        """Where the compiled function begins."""
        with self._lock:
            address: int = self._compiled.address
            return address


def _kept(make: Callable[[Any], Any], function: Callable[..., Any]) -> Any:
    # Whether the system lets a process have AMX is nothing that numba knows.
    function.__qualname__ += f"_{_digest(Path(function.__code__.co_filename).parent)}{'_amx' * has_amx()}"
    made = make(function)
    if keeps_code():
        try:
            made._cache = _Cache(function)
        except RuntimeError as error:  # this one's folder cannot be written, though another could
            logger.warning("%s is compiled again in every process (%s)", function.__name__, error)
    return made


class _Cache(caching.FunctionCache):  # type: ignore[misc]  # numba is untyped
    """numba's cache of one function, with checksums."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _CheckedFiles(self.cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what was compiled; where the files cannot be written it stays in this process."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_of_failed_save(self.cache_path, error.strerror)


class _CheckedFiles(caching.IndexDataCacheFile):  # type: ignore[misc]  # numba is untyped
    """numba's index and data files of one function, each with its SHA-256 behind what numba writes, where unpickling stops before it."""

    def _load_index(self) -> Any:
        return super()._load_index() if _is_sound(self._index_path) else {}

    def _load_data(self, name: str) -> Any:
        return super()._load_data(name) if _is_sound(self._data_path(name)) else None

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[BinaryIO]:
        with super()._open_for_write(filepath) as file:
            yield file
            file.flush()
            file.write(_checksum(Path(file.name).read_bytes()))


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _is_sound(path: str) -> bool:
    """Whether a file of the cache is there and whole; a damaged one is deleted."""
    file, size = Path(path), hashlib.sha256().digest_size
    try:
        content = file.read_bytes()
        if content[-size:] == _checksum(content[:-size]):
            return True
        file.unlink()
    except OSError:  # not there, or deleted by another process at the same time
        return False
    _warn_of_damage(file.parent)
    return False


@cache
def _warn_of_damage(folder: Path) -> None:
    logger.warning("%s: compiled code that cannot be read was deleted; it is compiled again", folder)


@cache
def _warn_of_failed_save(folder: str, reason: str) -> None:
    logger.warning("%s: compiled code cannot be saved (%s): it is compiled again in every process", folder, reason)


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
        caching.FunctionCache(_finds_folder)
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
    total = hashlib.sha256(_LAYOUT)
    for path in sorted(folder.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]
