"""Hugging Face ``config.json`` to `encoder.config.EncoderConfig` and back, a module for each group of families."""

from quiver.encoder.checkpoints.families import config_from_hf, config_to_hf
from quiver.encoder.checkpoints.family import ConfigStyle

__all__ = ["ConfigStyle", "config_from_hf", "config_to_hf"]
