"""The format of a family's checkpoints as tables: keys of config.json, tensor names and head layouts, for reading and for writing.

Each family module defines one `CheckpointFormat` per family; `quiver.encoder.checkpoints.checkpoint` lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from quiver.encoder.config import EncoderConfig, Family, global_every
from quiver.encoder.errors import InputError

ConfigStyle = Literal["v4", "v5"]  # of ModernBERT's keys: v4 (read by transformers 4 and 5) or v5; other families ignore it

# Hugging Face's names of the activations.
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


class ConfigReader:
    """A JSON object with typed access; errors name the key."""

    def __init__(self, hf: Mapping[str, Any], *, path: str = "") -> None:
        self.hf = hf
        self.path = path

    def integer(self, key: str, default: int | None = None) -> int:
        """Return an integer; without a default the key is required."""
        value = self._value(key, default)
        if type(value) is not int:  # not isinstance: True is an int in Python
            raise self.error(key, "must be an integer")
        return value

    def identifier(self, key: str) -> int | None:
        """Return a token id that may be missing or null."""
        return None if self.hf.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number; null counts as missing, and without a default the key is required."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "must be a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false; the default if missing."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def activation(self, key: str) -> str:
        """Return one of `quiver.encoder.config.ACTIVATIONS`, given by its Hugging Face name."""
        name = self._value(key, "gelu")
        if not isinstance(name, str) or name not in HF_ACTIVATIONS:
            raise self.error(key, f"must be one of {', '.join(sorted(HF_ACTIVATIONS))}")
        return HF_ACTIVATIONS[name]

    def inner(self, key: str) -> ConfigReader | None:
        """Return an object inside this one; None if missing or null."""
        value = self.hf.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return ConfigReader(value, path=f"{self.path}{key}.")

    def require(self, key: str, *supported: object) -> None:
        """Refuse an option that Quiver does not support; a missing key and null are fine."""
        value = self.hf.get(key)
        # Types are compared too: 0 is not False, a factor of 1 is not True.
        if value is not None and not any(type(value) is type(one) and value == one for one in supported):
            raise self.error(key, f"must be {' or '.join(repr(one) for one in supported)}" if supported else "is not supported")

    def error(self, key: str, rule: str) -> InputError:
        """Make an error that names a key, a rule and the key's value."""
        return InputError(f"config.json: {self.path}{key} {rule}, got {self.hf.get(key)!r}")

    def _value(self, key: str, default: object) -> object:
        value = self.hf.get(key)
        if value is None and default is None:
            raise InputError(f"config.json: the key {self.path + key!r} is missing")
        return default if value is None else value


# Reader of a key for each type of a field of EncoderConfig; `activation` is the only text.
_READERS: dict[object, Callable[..., Any]] = {
    int: ConfigReader.integer,
    float: ConfigReader.number,
    bool: ConfigReader.flag,
    str: ConfigReader.activation,
}
_TYPES = get_type_hints(EncoderConfig)


@dataclass(frozen=True)
class ConfigKey:
    """A key of config.json and the fields of `EncoderConfig` that have its value."""

    name: str
    # The fields; the value of the first is written. Default: the field with the name of the key.
    fields: tuple[str, ...] = ()
    default: Any = None  # value of a missing key; None if the key is required
    to_hf: Mapping[str, str] | None = None  # for `activation`: our names to Hugging Face's

    def read(self, keys: ConfigReader) -> dict[str, Any]:
        """Return the fields that this key gives."""
        fields = self.fields or (self.name,)
        read = _READERS[_TYPES[fields[0]]]
        value = read(keys, self.name) if self.default is None else read(keys, self.name, self.default)
        return dict.fromkeys(fields, value)

    def write(self, config: EncoderConfig) -> Any:
        """Return the value of this key."""
        value = getattr(config, (self.fields or (self.name,))[0])
        return value if self.to_hf is None else self.to_hf[value]


def global_layers(keys: ConfigReader, key: str = "num_hidden_layers") -> dict[str, Any]:
    """Read the number of layers of a model whose layers are all global."""
    return {"layer_types": global_every(keys.integer(key), 1)}


@dataclass(frozen=True)
class TensorNames:
    """Tensor names of one family."""

    prefix: str  # prefix of every key in checkpoints with a head
    # Our module names (``{}`` is the layer) to theirs; several of theirs are stacked in that order. Empty if they are ours.
    names: Mapping[str, tuple[str, ...]]
    heads: re.Pattern[str]  # pattern of keys that belong to heads and poolers, not to the encoder
    # Pattern of keys that hold no weights (old files store position ids).
    buffers: re.Pattern[str] = re.compile(r"(?!)")  # none
    other_prefixes: tuple[str, ...] = ()
    plain_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # names that differ if the MLP has no gate
    swapped: frozenset[str] = frozenset()  # modules whose two halves of rows are swapped in their files
    renames: tuple[tuple[re.Pattern[str], str], ...] = ()  # patterns of older or other names, and their replacements

    def current_name(self, key: str) -> str:
        """Return a file's key without its prefix, under its current name."""
        found = (prefix for prefix in (self.prefix, *self.other_prefixes) if key.startswith(prefix))
        key = key.removeprefix(max(found, key=len, default=""))
        for pattern, replacement in self.renames:
            key = pattern.sub(replacement, key)
        return key

    def theirs(self, module: str, layer: str, *, gated: bool) -> tuple[str, ...] | None:
        """Return their names of one of our modules, None if they have no such module."""
        if not self.names:
            return (module.format(layer),)
        names = self.names.get(module) if gated else self.plain_names.get(module, self.names.get(module))
        return None if names is None else tuple(name.format(layer) for name in names)


Task = Literal["masked_lm", "classifier", "span_qa"]

# Names in auto_map of the class for each task.
AUTO_CLASSES: dict[Task, str] = {
    "masked_lm": "AutoModelForMaskedLM",
    "classifier": "AutoModelForSequenceClassification",
    "span_qa": "AutoModelForQuestionAnswering",
}


@dataclass(frozen=True)
class HeadLayout:
    """How one family stores the head of one task."""

    architecture: str  # class that opens such a folder in transformers or in the family's own code
    modules: Mapping[str, str]  # our module names to theirs; ``{}`` is the encoder's prefix
    # Our names of tensors with a second name beside that of their module; the module's name takes precedence if a file has both.
    tensors: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointFormat:
    """How one family stores an encoder and its heads."""

    family: Family
    about: Mapping[str, Any]  # keys of config.json that are the same for every model: class, model_type, code
    tensors: TensorNames
    heads: Mapping[Task, HeadLayout]  # layout of the head of each task that the family has
    read: Callable[[ConfigReader], dict[str, Any]] = global_layers  # fields of `EncoderConfig` that more than one key decides
    keys: tuple[ConfigKey, ...] = ()  # keys that correspond to fields
    # Keys of options that Quiver does not support, and their only supported values.
    requires: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)  # fields of `EncoderConfig` that are the same for every model
    write: Callable[[EncoderConfig, ConfigStyle], dict[str, Any]] = lambda _config, _style: {}  # keys that more than one field decides

    def to_config(self, keys: ConfigReader) -> EncoderConfig:
        """Read an architecture from config.json."""
        for key, supported in self.requires.items():
            keys.require(key, *supported)
        values = {name: value for key in self.keys for name, value in key.read(keys).items()}
        return EncoderConfig(**{"family": self.family, **self.constants, **values, **self.read(keys)})

    def to_hf(self, config: EncoderConfig, style: ConfigStyle) -> dict[str, Any]:
        """Write an architecture as config.json, without a check that all of it can be expressed."""
        return {**self.about, **{key.name: key.write(config) for key in self.keys}, **self.write(config, style)}
