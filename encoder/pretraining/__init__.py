"""Pretraining by masked language modelling: corpus, packing, masks, schedules, phases, the loop.

It begins with `load_pretraining_recipe` and ends with `pretrain`; what stands between is importable from its own module.
"""

from quiver.encoder.pretraining.recipe import load_pretraining_recipe
from quiver.encoder.pretraining.run import prepare, pretrain

__all__ = ["load_pretraining_recipe", "prepare", "pretrain"]
