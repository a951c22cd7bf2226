"""Dtype of training: bfloat16 autocast or float32. Weights, gradients and optimizer state are float32 in both.

A recipe says ``auto``, and a run records what that stands for, so that a resumed run keeps it on another machine. There is no float16: its
gradients need a scaler, which only GPUs below compute capability 8.0 would use.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from quiver.encoder.errors import InputError
from quiver.encoder.training.recipe_file import AUTO, TrainingDtype
from quiver.encoder.training.run_folder import recipe_of

logger = logging.getLogger(__name__)

BFLOAT16_SINCE = (8, 0)  # compute capability of the first GPUs that multiply bfloat16 matrices


class _Recipe(Protocol):
    """A recipe with a section ``training`` that has a ``dtype``."""

    @property
    def training(self) -> Any: ...

    def replace(self, **changes: Any) -> Any: ...


Recipe = TypeVar("Recipe", bound=_Recipe)


def training_dtype(dtype: TrainingDtype, device: torch.device | str) -> Literal["float32", "bfloat16"]:
    """Dtype in which the forward and backward pass run on a device."""
    if dtype == "float32" or torch.device(device).type != "cuda":
        return "bfloat16" if dtype == "bfloat16" else "float32"
    capability = torch.cuda.get_device_capability(device)
    if capability >= BFLOAT16_SINCE:
        return "bfloat16"
    if dtype == "bfloat16":
        major, minor = capability
        raise InputError(f"training.dtype: bfloat16 needs a GPU of compute capability 8.0, this one has {major}.{minor}; use float32")
    return "float32"


def with_training_dtype(recipe: Recipe, device: torch.device | str, *, resumed: Path | None = None) -> Recipe:
    """Return the recipe with ``training.dtype: auto`` replaced by the dtype that the run has or gets."""
    dtype: TrainingDtype = recipe.training.dtype
    begun = None if resumed is None or dtype != AUTO else recipe_of(resumed)
    found = training_dtype(begun["training"]["dtype"] if begun is not None else dtype, device)
    if dtype == AUTO and found == "float32" and torch.device(device).type == "cuda" and begun is None:
        logger.warning("training in float32: bfloat16 needs a GPU of compute capability 8.0")
    if dtype == found:
        return recipe
    changed: Recipe = recipe.replace(training=recipe.training.replace(dtype=found))
    return changed


def autocast(dtype: TrainingDtype, device: torch.device) -> AbstractContextManager[None]:
    """Run the block in the dtype of training on a device, see `training_dtype`."""
    context: AbstractContextManager[None] = torch.autocast(device.type, torch.bfloat16, enabled=training_dtype(dtype, device) == "bfloat16")
    return context
