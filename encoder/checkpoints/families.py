"""The registry of families: each by its name and model types; config.json read and written.

A new family is a module with its `CheckpointFormat`, and its lines in `FORMATS` and `MODEL_TYPES` here.

Writing loses nothing: the written config.json is read again, and if the architectures differ the error names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from quiver.encoder.checkpoints.bert import BERT, GTE, MOSAICBERT, NOMICBERT, ROBERTA, is_mosaicbert
from quiver.encoder.checkpoints.format import CheckpointFormat, ConfigReader, ConfigStyle, Task
from quiver.encoder.checkpoints.modernbert import MODERNBERT
from quiver.encoder.checkpoints.quiver import QUIVER
from quiver.encoder.config import EncoderConfig, Family
from quiver.encoder.errors import InputError

FORMATS: dict[Family, CheckpointFormat] = {each.family: each for each in (MODERNBERT, BERT, ROBERTA, MOSAICBERT, NOMICBERT, GTE, QUIVER)}
MODEL_TYPES: dict[str, CheckpointFormat] = {
    "modernbert": MODERNBERT,
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "nomic_bert": NOMICBERT,
    "new": GTE,
    "gte": GTE,
    "quiver": QUIVER,
}
"""``model_type`` of config.json -> format; a MosaicBERT's file says bert."""


def families_with_head(task: Task) -> list[Family]:
    """Return the families whose checkpoints can hold a head of this task."""
    return [family for family, checkpoint_format in FORMATS.items() if task in checkpoint_format.heads]


def config_from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
    """Convert a parsed config.json to an `EncoderConfig`; an InputError names a key that is not supported."""
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in MODEL_TYPES:
        raise InputError(f"config.json: model_type must be one of {', '.join(sorted(MODEL_TYPES))}, got {family!r}")
    keys, found = ConfigReader(hf), MODEL_TYPES[family]
    return (MOSAICBERT if found is BERT and is_mosaicbert(keys) else found).to_config(keys)


def config_to_hf(config: EncoderConfig, *, style: ConfigStyle = "v4") -> dict[str, Any]:
    """Convert an `EncoderConfig` to its family's config.json; an InputError names the field that its format cannot express."""
    written = FORMATS[config.family].to_hf(config, style)
    remedy = "use family quiver"
    try:
        again = config_from_hf(written)
    except InputError as error:
        raise InputError(f"a {config.family} config.json cannot hold this architecture ({error}); {remedy}") from error
    wanted, kept = _with_effect(config), _with_effect(again)
    if "cls_token_id" not in written:  # these families leave such ids to the tokenizer
        kept |= {key: wanted[key] for key in ("cls_token_id", "sep_token_id")}
    if lost := [name for name in wanted if name not in kept or wanted[name] != kept[name]]:
        raise InputError(f"a {config.family} config.json cannot hold {', '.join(f'{name} {wanted[name]!r}' for name in lost)}; {remedy}")
    return written


def _with_effect(config: EncoderConfig) -> dict[str, Any]:
    """Return the fields of an architecture that have an effect, given its other fields."""
    values = asdict(config)
    for kind in {"global", "local"} - (set(config.layer_types) if config.positions == "rope" else set()):
        del values[f"{kind}_theta"], values[f"{kind}_scaling"]
    if config.positions != "rope":
        del values["rotary_fraction"]
    if "local" not in config.layer_types:
        del values["window"]
    return values
