"""The recipe of a training run: what is trained, on what, and how; YAML in, every problem at once.

The fields stand in `quiver.retrieval.training.sections`, how they hang together in `quiver.retrieval.training.rules`. This module opens no
data and no model: what a hub or a folder holds is found out by whoever loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quiver.encoder.training.recipe_file import load_sections
from quiver.retrieval.training.rules import LOSSES, RULES
from quiver.retrieval.training.sections import Recipe

KINDS = tuple(LOSSES)
"""Values of ``kind`` that make a recipe one of these."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: ``training.batch_size=64`` and the like, see `load_sections`.

    Raises:
        SchemaError: The file is not YAML, or a setting is unknown, missing, of the wrong type, out of its range, repeated,
            or at odds with another; names all of them.
        InputError: There is no such recipe, or it cannot be read.
    """
    return load_sections(path, Recipe, RULES, kinds=KINDS, overrides=overrides)
