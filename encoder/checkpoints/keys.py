"""A parsed config.json whose values are asked for by key and type; what is wrong is said with the key's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from quiver.encoder.errors import InputError

ConfigStyle = Literal["v4", "v5"]
"""Generation of ModernBERT's keys; the other families have had one."""

# Hugging Face's names for the same functions.
HF_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
TO_HF_ACTIVATION = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "silu": "silu", "relu": "relu"}


class Keys:
    """A JSON object with typed access.

    Args:
        hf: The object.
        path: What stands before a key in errors, such as ``rope_parameters.full_attention.``.
    """

    def __init__(self, hf: Mapping[str, Any], *, path: str = "") -> None:
        self.hf = hf
        self.path = path

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number; without a default the key must be there."""
        value = self._value(key, default)
        if type(value) is not int:  # not isinstance: True is an int to Python
            raise self.error(key, "must be an integer")
        return value

    def identifier(self, key: str) -> int | None:
        """A token id that may be absent or null."""
        return None if self.hf.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number; null counts as absent, and without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; absent is the default."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def activation(self, key: str) -> str:
        """One of `encoder.config.ACTIVATIONS` under a Hugging Face name."""
        name = self._value(key, "gelu")
        if not isinstance(name, str) or name not in HF_ACTIVATIONS:
            raise self.error(key, f"must be one of {', '.join(sorted(HF_ACTIVATIONS))}")
        return HF_ACTIVATIONS[name]

    def inner(self, key: str) -> Keys | None:
        """An object inside this one; None where it is absent or null."""
        value = self.hf.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return Keys(value, path=f"{self.path}{key}.")

    def require(self, key: str, *supported: object) -> None:
        """Refuse an architecture's option that Quiver does not have; an absent key and null are fine."""
        value = self.hf.get(key)
        # Compared with their types: 0 is not False, a factor of 1 is not True.
        if value is not None and not any(type(value) is type(one) and value == one for one in supported):
            raise self.error(key, f"must be {' or '.join(repr(one) for one in supported)}" if supported else "is not supported")

    def error(self, key: str, rule: str) -> InputError:
        """An error that names a key, a rule and the key's value."""
        return InputError(f"config.json: {self.path}{key} {rule}, got {self.hf.get(key)!r}")

    def _value(self, key: str, default: object) -> object:
        value = self.hf.get(key)
        if value is None and default is None:
            raise InputError(f"config.json: the key {self.path + key!r} is missing")
        return default if value is None else value
