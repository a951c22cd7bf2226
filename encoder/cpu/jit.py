"""Functions compiled by numba and cached on disk.

numba invalidates a cached function when its own file changes, but a function may call others from another file: the cache key contains a
digest of all modules in the function's folder. numba trusts the files of its cache. Here each file ends with a checksum: a damaged file is
deleted and written again, and nothing in it is unpickled or executed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar, cast

import numba
from numba.core import caching
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from quiver.encoder.cpu.support import has_amx

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Part of the digest; change it when the layout of the cache files changes.
_LAYOUT = b"checksums/1"


def jit(function: Function, *, reordered: bool = False) -> Function:
    """Compile a function at its first call, and cache the result on disk; ``reordered`` allows sums to be reordered for vectorization."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"} if reordered else False}
    return cast(Function, _with_cache(numba.njit(**options), function))


class CompiledCallback:
    """A C callback ``function(pointer)``, compiled when its address is first read; it cannot raise."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self._lock = Lock()
        self._compiled: Any = None

    @property
    def address(self) -> int:
        """Address of the compiled function."""
        with self._lock:
            if self._compiled is None:
                # numba.cfunc compiles immediately, before a cache could be set; this is the part of it that creates the object.
                signature = normalize_signature("void(voidptr)")
                self._compiled = _with_cache(lambda function: CFunc(function, signature, locals={}, options={}), self._function)
                self._compiled.compile()
            address: int = self._compiled.address
            return address


def _with_cache(make: Callable[[Any], Any], function: Callable[..., Any]) -> Any:
    # numba's own cache key does not cover whether the operating system grants AMX to a process.
    function.__qualname__ += f"_{_digest(Path(function.__code__.co_filename).parent)}{'_amx' * has_amx()}"
    made = make(function)
    if can_cache():
        try:
            made._cache = _Cache(function)
        except RuntimeError as error:  # this function's folder cannot be written, though another one could
            logger.warning("%s: compiled code is not cached, so every process compiles it again (%s)", function.__name__, error)
    return made


class _Cache(caching.FunctionCache):  # type: ignore[misc]  # numba is untyped
    """numba's cache of one function, with checksums."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._cache_file = _CheckedFiles(self.cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp())

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache a compiled function; if the files cannot be written, it stays in this process."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(f"{self.cache_path}: compiled code cannot be saved ({error.strerror}), so every process compiles it again")


class _CheckedFiles(caching.IndexDataCacheFile):  # type: ignore[misc]  # numba is untyped
    """numba's index and data files of one function, each followed by its SHA-256; unpickling stops before the checksum."""

    def _load_index(self) -> Any:
        return super()._load_index() if _is_sound(self._index_path) else {}

    def _load_data(self, name: str) -> Any:
        return super()._load_data(name) if _is_sound(self._data_path(name)) else None

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[BinaryIO]:
        with super()._open_for_write(filepath) as file:
            yield file
            file.flush()
            file.write(hashlib.sha256(Path(file.name).read_bytes()).digest())


def _is_sound(path: str) -> bool:
    """Return whether a cache file exists and is intact; a damaged one is deleted."""
    file, size = Path(path), hashlib.sha256().digest_size
    try:
        content = file.read_bytes()
        if content[-size:] == hashlib.sha256(content[:-size]).digest():
            return True
        file.unlink()
    except OSError:  # missing, or deleted by another process at the same time
        return False
    _warn_once(f"{file.parent}: deleted damaged compiled code; it is compiled again")
    return False


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


@cache
def can_cache() -> bool:
    """Return whether compiled code can be cached on disk, if only in a private folder among the temporary files; logs once if not.

    Without a cache every process would spend seconds on compiling, more than most work gains, so the kernels are not used then.
    """
    if _finds_folder():
        return True
    folder = _private_folder()
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
        if _finds_folder():
            logger.warning("compiled code is cached in %s, the only writable folder; set NUMBA_CACHE_DIR to choose another", folder)
            return True
    logger.warning("compiled code cannot be cached, so the slower uncompiled path is used; set NUMBA_CACHE_DIR to a writable folder")
    return False


def _finds_folder() -> bool:
    try:
        caching.FunctionCache(_finds_folder)
    except RuntimeError:
        return False
    return True


def _private_folder() -> Path | None:
    """Return a temporary folder that only this user can write to, because code in it is executed; None if there is none."""
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
    """Digest of all modules in a folder."""
    total = hashlib.sha256(_LAYOUT)
    for path in sorted(folder.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]
