"""Hugging Face checkpoints: config.json and weights, both ways. Each family module holds its config keys, tensor names and head layouts."""

from quiver.encoder.checkpoints.checkpoint import config_from_hf, config_to_hf
from quiver.encoder.checkpoints.format import ConfigStyle

__all__ = ["ConfigStyle", "config_from_hf", "config_to_hf"]
