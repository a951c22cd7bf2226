"""Hugging Face ``config.json`` to `encoder.config.EncoderConfig` and back, a module for each group of families."""

from encoder.hf_config.families import config_from_hf, config_to_hf
from encoder.hf_config.keys import ConfigStyle

__all__ = ["ConfigStyle", "config_from_hf", "config_to_hf"]
