"""Functions compiled by numba and cached on disk.

numba invalidates a cached function when its own file changes, but a function may call others from another file: the cache key contains a
digest of all modules in the function's folder. numba trusts the files of its cache. Here each file ends with a checksum: a damaged file is
deleted and written again, and nothing in it is unpickled or executed.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, TypeVar, cast

import numba
from numba.core import caching, types
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature
from numba.extending import intrinsic

from quiver.encoder.cpu.support import can_cache, has_amx

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

# Part of the digest; change it when the layout of the cache files changes.
_LAYOUT = b"checksums/1"


def jit(function: Function, *, reordered: bool = False) -> Function:
    """Compile a function at its first call, and cache the result on disk; ``reordered`` allows sums to be reordered for vectorization."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"} if reordered else False}
    return cast(Function, _with_cache(numba.njit(**options), function))


def intrinsic_of(wrap: Callable[[Any], Any], emit: Callable[..., Any], returns: Any = types.void) -> Any:
    """Make a function for compiled code from an emitter, which gets the wrapped LLVM builder; all its arguments are numbers."""

    def typed(_context: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            result = emit(wrap(builder), *values)
            return context.get_dummy_value() if result is None else result

        return returns(*arguments), generate

    typed.__name__ = emit.__name__
    typed.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]  # numba counts arguments by it
    return intrinsic(typed)


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
def _digest(folder: Path) -> str:
    """Digest of all modules in a folder."""
    total = hashlib.sha256(_LAYOUT)
    for path in sorted(folder.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]
