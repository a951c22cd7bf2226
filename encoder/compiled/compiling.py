"""Functions compiled by numba, and kept on disk where that is possible.

numba keeps what it has compiled until the file of the function changes; what a function calls may stand in another file. So the name
under which it is kept says what the function's whole folder looked like.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar, cast

import numba

from encoder.processor import has_amx

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


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
    try:
        return keep(function)
    except RuntimeError as error:  # numba finds no folder that it may write to
        logger.warning("%s is compiled again in every process (%s)", function.__name__, error)
        return plain(function)


@cache
def _digest(folder: Path) -> str:
    """What tells one state of a folder's modules from another."""
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()[:12]
