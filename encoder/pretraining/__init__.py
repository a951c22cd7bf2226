"""Pretraining by masked language modelling: `load_pretraining_recipe` reads a recipe, `pretrain` runs it on the trainer.

`prepare` does only the part that needs no GPU: it trains the tokenizer and tokenizes the corpus.
"""

from quiver.encoder.pretraining.recipe import load_pretraining_recipe
from quiver.encoder.pretraining.run import prepare, pretrain

__all__ = ["load_pretraining_recipe", "prepare", "pretrain"]
