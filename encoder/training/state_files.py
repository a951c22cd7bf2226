"""State of a run on disk and back, to the bit and without pickle: tensors in a safetensors file, all else as JSON beside it.

What goes in is what optimisers and generators call their state: dicts (under text or whole numbers), lists, tuples, numbers, text, truth
values, None and tensors. It comes out as it went in; floats survive because Python writes them so that they read back the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, save_tensors, write_json


def write_state(stem: Path, state: object) -> None:
    """Write ``stem.json`` and ``stem.safetensors``.

    Raises:
        ValueError: The state holds something that is none of the above, or a float that is not finite.
        OSError: A file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    tree = _encode(state, "state", tensors)
    save_tensors(tensors, stem.with_suffix(".safetensors"))
    write_json(stem.with_suffix(".json"), {"state": tree})


def read_state(stem: Path) -> Any:
    """What `write_state` was given; tensors on the CPU.

    Raises:
        InputError: A file is missing or not what `write_state` writes.
    """
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
    """The value as JSON; what JSON does not tell apart stands in an object of one key, which says what it is."""
    if isinstance(value, Tensor):
        stored = f"{len(tensors)}.{name}"  # the number tells apart what the names do not, a key 0 from a key "0"
        tensors[stored] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": stored}
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str | int)]:
            raise ValueError(f"{name}: a key must be text or a whole number, got {odd[0]!r}")
        return {"dict": [[key, _encode(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_encode(item, f"{name}.{place}", tensors) for place, item in enumerate(value)]}
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
