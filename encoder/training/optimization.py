"""Optimizers, learning rates and dtype of all training. Matrices and embeddings decay; vectors (biases, scales of norms) do not.

The dtype is bfloat16 autocast or float32; weights, gradients and optimizer state are float32 in both. A recipe says ``auto``, and a run
records what that stands for, so that a resumed run keeps it on another machine. There is no float16: its gradients need a scaler, which
only GPUs below compute capability 8.0 would use.

Sources: AdamW, arXiv:1711.05101; its schedule-free form, arXiv:2405.15682 (package schedulefree); StableAdamW, arXiv:2304.13013 (package
torch-optimi), with weight decay decoupled from the learning rate as in ModernBERT, arXiv:2412.13663, section 2.2.2; transformers'
schedules; the trapezoidal schedule, arXiv:1802.08770 and arXiv:2106.04560, with the 1-sqrt decay of arXiv:2405.18392.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from quiver.encoder.errors import InputError
from quiver.encoder.training.recipe_file import AUTO, TrainingDtype
from quiver.encoder.training.run_folder import recipe_of
from quiver.encoder.training.sharding import load_whole_optimizer_state

logger = logging.getLogger(__name__)

OptimizerName = Literal["adamw", "schedule_free_adamw", "stable_adamw"]

PACKAGES = {"schedule_free_adamw": ("schedulefree", "schedulefree"), "stable_adamw": ("optimi", "torch-optimi")}
"""Optimizer -> module and distribution that implement it, if it is not torch."""

DECAYS: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "one_minus_sqrt": lambda done: 1.0 - math.sqrt(done),
    "constant": lambda done: 1.0,
}
"""Shape of the decay -> share of the peak that is left, given the share of the decay that is done."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of an optimizer."""

    name: OptimizerName  # ``adamw``, ``schedule_free_adamw`` or ``stable_adamw``
    learning_rate: float  # peak learning rate
    # Decay of matrices. AdamW multiplies it by the learning rate; StableAdamW by the learning rate's share of the peak.
    weight_decay: float
    beta1: float = 0.9  # decay rate of the mean of gradients
    beta2: float = 0.999  # decay rate of the mean of squared gradients
    eps: float = 1e-8  # added to the root of the mean of squares
    warmup_steps: int = 0  # warm-up of the schedule-free form, which has a schedule of its own


def require_optimizer(name: str) -> None:
    """Check early that the package of an optimizer is installed."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
        raise InputError(f"the optimizer {name} needs {PACKAGES[name][1]}: pip install {PACKAGES[name][1]}")


def make_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make an optimizer over the parameters that require gradients."""
    require_optimizer(settings.name)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (settings.beta1, settings.beta2)
    optimizer: Optimizer
    if settings.name == "adamw":
        return AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.eps, fused=True)
    library = importlib.import_module(PACKAGES[settings.name][0])
    if settings.name == "schedule_free_adamw":
        optimizer = library.AdamWScheduleFree(
            groups, lr=settings.learning_rate, betas=betas, eps=settings.eps, warmup_steps=settings.warmup_steps
        )
        return optimizer
    optimizer = library.StableAdamW(
        groups,
        lr=settings.learning_rate,
        betas=betas,
        eps=settings.eps,
        decouple_lr=True,
        max_lr=settings.learning_rate,
        # The default is to use Triton kernels wherever Triton is installed, on CPUs too; they know no sharded weights.
        triton=None if trained[0].is_cuda and not isinstance(trained[0], DTensor) else False,
    )
    return optimizer


def restore_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore the state of an optimizer over the same whole weights, which may have been on another kind of device."""
    load_whole_optimizer_state(optimizer, state)
    for group in optimizer.param_groups:
        if "triton" in group and (not group["params"][0].is_cuda or isinstance(group["params"][0], DTensor)):
            group["triton"] = False  # part of the state of StableAdamW; Triton has no kernels for CPUs and sharded weights


def set_learning_rate(optimizer: Optimizer, *, peak: float, share: float, weight_decay: float) -> None:
    """Set the learning rate and weight decay of StableAdamW for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = peak * share
        group["max_lr"] = peak
        if group["params"][0].ndim >= 2:
            group["weight_decay"] = weight_decay


def learning_rate_share(
    done: float, *, warmup: float, decay_start: float, total: float, decay: str = "linear", final: float = 0.0
) -> float:
    """Learning rate of a step as a share of its peak: linear warm-up from 0, constant, decay to ``final``; all in steps, or in tokens."""
    if done < warmup:
        return done / warmup
    if done <= decay_start:
        return 1.0
    share = min(1.0, (done - decay_start) / max(1, total - decay_start))
    return final + (1.0 - final) * DECAYS[decay](share)


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
