"""From a config.json to an architecture and back: which module reads and writes which family.

A writer never loses anything: what it has written is read again, and where the two architectures differ the field is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from quiver.encoder.checkpoints.bert import read_bert, read_roberta, write_bert, write_mosaicbert, write_roberta
from quiver.encoder.checkpoints.keys import ConfigStyle, Keys
from quiver.encoder.checkpoints.modernbert import read_modernbert, write_modernbert
from quiver.encoder.checkpoints.quiver import read_quiver, write_quiver
from quiver.encoder.checkpoints.rotary_bert import read_gte, read_nomicbert, write_gte, write_nomicbert
from quiver.encoder.config import EncoderConfig, Family
from quiver.encoder.errors import InputError

READERS: dict[str, Callable[[Keys], EncoderConfig]] = {
    "modernbert": read_modernbert,
    "bert": read_bert,
    "roberta": read_roberta,
    "xlm-roberta": read_roberta,
    "camembert": read_roberta,
    "nomic_bert": read_nomicbert,
    "new": read_gte,
    "gte": read_gte,
    "quiver": read_quiver,
}
WRITERS: dict[Family, Callable[[EncoderConfig, ConfigStyle], dict[str, Any]]] = {
    "modernbert": write_modernbert,
    "bert": write_bert,
    "roberta": write_roberta,
    "mosaicbert": write_mosaicbert,
    "nomicbert": write_nomicbert,
    "gte": write_gte,
    "quiver": write_quiver,
}


def config_from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
    """Read a parsed config.json.

    Raises:
        InputError: The architecture or a setting is not one of ours; the message names the key.
    """
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise InputError(f"config.json: model_type must be one of {', '.join(sorted(READERS))}, got {family!r}")
    return READERS[family](Keys(hf))


def config_to_hf(config: EncoderConfig, *, style: ConfigStyle = "v4") -> dict[str, Any]:
    """An architecture as its family's config.json.

    Args:
        config: The architecture.
        style: For ModernBERT: v4 keys, which transformers 4 and 5 both read, or v5 keys.

    Raises:
        InputError: The family's format cannot express the architecture; the message names the field.
    """
    written = WRITERS[config.family](config, style)
    remedy = "family quiver can hold it"
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
    """The fields of an architecture without those that its other fields make meaningless."""
    values = asdict(config)
    for kind in {"global", "local"} - (set(config.layer_types) if config.positions == "rope" else set()):
        del values[f"{kind}_theta"], values[f"{kind}_scaling"]
    if config.positions != "rope":
        del values["rotary_fraction"]
    if "local" not in config.layer_types:
        del values["window"]
    return values
