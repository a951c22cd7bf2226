"""What config.json says of a head, and how it is written there.

ModernBERT has keys for it; the other families' heads follow from their layers, and a setting they have no key for is refused.

Source: the configurations of ModernBERT, BERT and RoBERTa in transformers 5.3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from quiver.encoder.checkpoints.head_transform import SHARED_TRANSFORM, TransformConfig, head_dropout
from quiver.encoder.checkpoints.keys import TO_HF_ACTIVATION, Keys
from quiver.encoder.config import EncoderConfig
from quiver.encoder.errors import InputError

Value = TypeVar("Value", bound=str)


def read_transform(keys: Keys, default: TransformConfig, config: EncoderConfig) -> TransformConfig:
    """The layer before the last matrix; only ModernBERT's keys can say another than the family's."""
    if config.family not in SHARED_TRANSFORM:
        return default
    return replace(default, bias=keys.flag("classifier_bias"), activation=keys.activation("classifier_activation"))


def read_dropout(keys: Keys, config: EncoderConfig) -> float:
    """The dropout before the matrix of labels."""
    dropout = keys.number("classifier_dropout", head_dropout(config))
    if not 0 <= dropout < 1:
        raise keys.error("classifier_dropout", "must be >= 0 and < 1")
    return dropout


def read_labels(keys: Keys) -> tuple[int, tuple[str, ...] | None]:
    """Number of labels, and their names where config.json has them."""
    names = keys.inner("id2label")
    if names is None:
        count = keys.integer("num_labels", 2)
        if count < 1:
            raise keys.error("num_labels", "must be >= 1")
        return count, None
    ordered = [names.hf.get(str(number)) for number in range(len(names.hf))]
    if not ordered or not all(isinstance(name, str) for name in ordered):
        raise keys.error("id2label", 'must name the labels "0", "1", ...')
    if keys.integer("num_labels", len(ordered)) != len(ordered):
        raise keys.error("num_labels", f"must be {len(ordered)}, the number of labels in id2label")
    return len(ordered), tuple(str(name) for name in ordered)


def one_of(keys: Keys, key: str, known: dict[Value, Any]) -> Value | None:
    """A value that is one of these, None where config.json says nothing."""
    value = keys.hf.get(key)
    if value is None:
        return None
    for one in known:
        if value == one:
            return one
    raise keys.error(key, f"must be one of {', '.join(known)}")


def transform_settings(transform: TransformConfig, default: TransformConfig, config: EncoderConfig) -> dict[str, Any]:
    """What `read_transform` reads.

    Raises:
        InputError: The family's config.json has no words for it.
    """
    if config.family not in SHARED_TRANSFORM:
        if transform != default:
            raise InputError(f"transform: a {config.family} config.json cannot say {transform}")
        return {}
    activation = TO_HF_ACTIVATION.get(transform.activation)
    if activation is None or replace(transform, bias=default.bias, activation=default.activation) != default:
        raise InputError(f"transform: a {config.family} config.json cannot say {transform}")
    return {"classifier_bias": transform.bias, "classifier_activation": activation}
