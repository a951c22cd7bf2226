"""What a model folder of sentence-transformers or PyLate says of its modules, read before a library loads it.

The libraries take what they are given: sentence-transformers opens a ColBERT and fails at its first text, PyLate opens any encoder
and draws the projection that it lacks at random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from quiver.encoder.errors import InputError

LOAD_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError)
"""What the libraries raise for a model that is missing, malformed, unknown to them, or whose weights do not fit."""


def check_present(source: str) -> None:
    """Refuse a name that is nothing, before a library tries to make a model of it.

    Raises:
        InputError: Neither a folder nor the hub, or its cache, has a model of that name.
    """
    if _read(source, "modules.json") is None and _read(source, "config.json") is None:
        raise InputError(f"{source}: no such model: neither a folder nor the hub has its modules.json or config.json")


def cannot_load(source: str, library: str, error: Exception) -> InputError:
    """A library's error as one line."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return InputError(f"{source}: {library} cannot load it: {reason}")


def is_late_interaction(source: str) -> bool:
    """Whether a model has one vector a token: saved by PyLate, by sentence-transformers 6, or Stanford's ColBERT.

    Raises:
        InputError: A file is not JSON.
    """
    settings = _read(source, "config_sentence_transformers.json")
    saved_by = settings.get("model_type") if isinstance(settings, dict) else None
    return saved_by in ("ColBERT", "MultiVectorEncoder") or _is_stanford(source)


def check_projected(source: str) -> None:
    """Refuse a model that PyLate would complete with random weights.

    Raises:
        InputError: The model is not an encoder with trained projections behind it, or a file is not JSON.
    """
    modules = _read(source, "modules.json")
    if isinstance(modules, list):
        names = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
        if len(names) < 2 or set(names[1:]) != {"Dense"}:
            raise InputError(f"{source}: not a model of PyLate: its modules are {', '.join(names) or 'none'}, not a Transformer and Dense")
    elif not _is_stanford(source):
        raise InputError(f"{source}: not a ColBERT model: it has no projection, and PyLate would draw one at random")


def _is_stanford(source: str) -> bool:
    config = _read(source, "config.json")
    return isinstance(config, dict) and "HF_ColBERT" in (config.get("architectures") or [])


def _read(source: str, name: str) -> Any:
    """A JSON file of a folder or of the hub; None where there is none."""
    from sentence_transformers.util import load_file_path

    path = load_file_path(source, name)
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
