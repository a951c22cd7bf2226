"""Quiver's own format: every field of `EncoderConfig` under its name, for architectures that no other format can express."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quiver.encoder.checkpoints.format import CheckpointFormat, ConfigReader, ConfigStyle, HeadLayout, TensorNames
from quiver.encoder.checkpoints.modernbert import MODERNBERT_TRANSFORM
from quiver.encoder.config import EncoderConfig, RopeScaling
from quiver.encoder.errors import InputError

# Keys of its config.json that are not fields.
ABOUT = frozenset({"model_type", "architectures", "torch_dtype", "dtype", "head"})


def _read_quiver(keys: ConfigReader) -> dict[str, Any]:
    """Missing fields have their defaults."""
    if "family" in keys.hf:
        raise InputError("config.json: unknown key family; use model_type")
    return _parse_fields(EncoderConfig, {"family": "quiver"} | {key: value for key, value in keys.hf.items() if key not in ABOUT}, "")


def _write_quiver(config: EncoderConfig, _style: ConfigStyle) -> dict[str, Any]:
    """Write all fields except the family, which model_type names."""
    values = asdict(config)
    del values["family"]
    return {**values, "layer_types": list(config.layer_types)}


def _parse_fields(kind: type[EncoderConfig | RopeScaling], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Check the keys of an object and the types of their values."""
    hints = get_type_hints(kind)
    if unknown := sorted(values.keys() - hints.keys()):
        raise InputError(f"config.json: unknown key {path}{unknown[0]}; the keys of a quiver config.json are EncoderConfig's fields")
    for field in fields(kind):
        if field.name not in values and field.default is MISSING:
            raise InputError(f"config.json: the key {path + field.name!r} is missing")
    return {name: _parse_typed(value, hints[name], path + name) for name, value in values.items()}


def _parse_typed(value: object, hint: Any, name: str) -> Any:
    if get_origin(hint) in (Union, UnionType):
        (inner,) = (one for one in get_args(hint) if one is not type(None))
        return None if value is None else _parse_typed(value, inner, name)
    if hint is RopeScaling and isinstance(value, Mapping):
        return RopeScaling(**_parse_fields(RopeScaling, value, f"{name}."))
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_parse_typed(one, get_args(hint)[0], name) for one in value)
    if get_origin(hint) is Literal and value in get_args(hint):
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        spoken = {int: "an integer", float: "a number", bool: "true or false", str: "a string", RopeScaling: "an object"}
        wanted = " or ".join(map(str, get_args(hint))) if get_origin(hint) is Literal else spoken.get(hint, "a list")
        raise InputError(f"config.json: {name} must be {wanted}, got {value!r}")
    return value


QUIVER = CheckpointFormat(
    family="quiver",
    about={"architectures": ["QuiverEncoder"], "model_type": "quiver"},
    read=_read_quiver,
    write=_write_quiver,
    tensors=TensorNames(prefix="encoder.", names={}, heads=re.compile(r"(head|decoder|classifier|qa_outputs)\.")),
    heads={
        "masked_lm": HeadLayout("QuiverForMaskedLM", {**MODERNBERT_TRANSFORM, "decoder": "decoder"}),
        "classifier": HeadLayout("QuiverForSequenceClassification", {**MODERNBERT_TRANSFORM, "out": "classifier"}),
        "span_qa": HeadLayout("QuiverForQuestionAnswering", {**MODERNBERT_TRANSFORM, "out": "classifier"}),
    },
)
