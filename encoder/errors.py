"""The error class for mistakes that the user can correct: in a file, an option, a checkpoint or a recipe.

The command line turns it into one line on standard error and exit status 2; every other exception is a bug and
keeps its traceback. It lives in the lowest package so that every layer can raise it.
"""

from __future__ import annotations

import importlib
import sys
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


def first_line(error: object) -> str:
    """Return the first line of an error's message, or the name of its type if it has none.

    Example:
        >>> first_line(OSError("no route to host")), first_line(KeyError())
        ('no route to host', 'KeyError')
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__


def import_for(purpose: str, module: str, install: str) -> ModuleType:
    """Import a library that only some tasks need.

    Args:
        purpose: What needs it, the subject of the error.
        module: Dotted name of the module.
        install: Argument of ``pip install`` that brings it.

    Raises:
        InputError: It is not installed.

    Example:
        >>> import_for("this page", "json", "json").__name__
        'json'
    """
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
    """Return the errors that a download may raise: OSError, RuntimeError (of hf_xet), and those of the clients that are loaded.

    The clients share no base class. The Hub's client up to version 0.x uses requests, whose errors are OSErrors; from 1.0 on it uses httpx,
    whose errors are not. Later versions of hf_xet have an error of their own.

    Args:
        more: Errors of the caller's own, to be caught with them.

    Example:
        >>> download_errors()[:2]
        (<class 'OSError'>, <class 'RuntimeError'>)
    """
    if "huggingface_hub" in sys.modules:
        importlib.import_module("huggingface_hub.errors")
    found = (getattr(sys.modules.get(module), name, None) for module, names in _CLIENT_ERRORS.items() for name in names)
    return (OSError, RuntimeError, *more, *(each for each in found if isinstance(each, type) and issubclass(each, Exception)))
