"""Training state: read and restore the random generators, and save and load any state without pickle.

The random generators are Python's, NumPy's global one (libraries use it), and torch's on the CPU and on this process's GPU.

On disk tensors are in a safetensors file and the rest in a JSON file beside it. Optimizers and generators consist of dicts (with string or
integer keys), lists, tuples, numbers, strings, booleans, None and tensors; all are restored bit for bit, floats included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, save_tensors, write_json


def random_state() -> dict[str, Any]:
    """Return the state of all random generators: numbers, text, tuples and tensors, see `write_state`."""
    name, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # libraries use the global generator
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(words).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the result of `random_state`; a state from a machine without a GPU does not change the GPU's generator."""
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002  # as above
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def seed_random(seed: int) -> None:
    """Seed all random generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  # as above
    torch.manual_seed(seed)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the state of all random generators at the end of the block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def write_state(stem: Path, state: object) -> None:
    """Write ``stem.json`` and ``stem.safetensors``."""
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "state", tensors)
    save_tensors(tensors, stem.with_suffix(".safetensors"))
    write_json(stem.with_suffix(".json"), {"state": tree})


def read_state(stem: Path) -> Any:
    """Read what `write_state` has written; tensors are on the CPU."""
    path = stem.with_suffix(".safetensors")
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    tree = read_json(stem.with_suffix(".json"))
    try:
        return _decode(tree["state"], tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{stem.with_suffix('.json')}: not the state of a run ({error})") from error


def _encode(value: object, name: str, tensors: dict[str, Tensor]) -> object:
    """The value as JSON; tensors, dicts, lists and tuples become objects of one key, which names the type."""
    if isinstance(value, Tensor):
        stored = f"{len(tensors)}.{name}"  # the number distinguishes a key 0 from a key "0"
        tensors[stored] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": stored}
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str | int)]:
            raise ValueError(f"{name}: a key must be text or a whole number, got {odd[0]!r}")
        return {"dict": [[key, _encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{name}: a {type(value).__name__} cannot be written")


def _decode(tree: object, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    [(kind, held)] = tree.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in held}
    if kind not in ("list", "tuple"):
        raise ValueError(f"unknown kind {kind!r}")
    items = [_decode(item, tensors) for item in held]
    return items if kind == "list" else tuple(items)
