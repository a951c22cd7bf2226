"""StableAdamW over a model's weights, with decay that is fully decoupled from the learning rate and spares norms and biases.

Source: StableAdamW, arXiv:2304.13013, as in the package torch-optimi; ModernBERT, arXiv:2412.13663, section 2.2.2. Decay in proportion to
the learning rate's share of its peak, not to the rate itself: arXiv:1711.05101, section 2. Clipping by StableAdamW takes the place of
clipping gradients.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from torch import nn
from torch.optim import Optimizer

from quiver.encoder.errors import InputError
from quiver.encoder.pretraining.sections import PhaseSection, TrainingSection


def require_optimizer() -> None:
    """Say before anything is read that the optimiser is not installed.

    Raises:
        InputError: torch-optimi cannot be found.
    """
    if importlib.util.find_spec("optimi") is None:
        raise InputError("pretraining needs torch-optimi: pip install 'quiver-retrieval[train]'")


def make_optimizer(model: nn.Module, training: TrainingSection, phase: PhaseSection) -> Optimizer:
    """The optimiser of all of a model's weights, at a learning rate of 0.

    Args:
        model: Its matrices decay, its vectors (norms, biases) do not.
        training: Betas and epsilon.
        phase: Its learning rate and decay, until `set_learning_rate` is told of another.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": phase.weight_decay, "decays": True},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0, "decays": False},
    ]
    optimizer: Optimizer = importlib.import_module("optimi").StableAdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=(training.beta1, training.beta2),
        eps=training.eps,
        decouple_lr=True,
        max_lr=phase.learning_rate,
        triton=None if weights[0].is_cuda else False,  # by itself it would take Triton's kernels wherever Triton is installed
    )
    return optimizer


def restore_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Put back what the ``state_dict`` of another one gave; that may have been on a GPU where this one is not.

    Args:
        optimizer: Of `make_optimizer`, for the same weights.
        state: Of the other one.
    """
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:
        if not group["params"][0].is_cuda:
            group["triton"] = False  # the state brings it along, and there are no kernels for a CPU


def set_learning_rate(optimizer: Optimizer, phase: PhaseSection, share: float) -> None:
    """Make an optimiser ready for an update.

    Args:
        optimizer: Of `make_optimizer`.
        phase: Whose peak learning rate and decay hold.
        share: Of the peak, 0..1; the decay has the same share of its own.
    """
    for group in optimizer.param_groups:
        group["lr"] = phase.learning_rate * share
        group["max_lr"] = phase.learning_rate
        if group["decays"]:
            group["weight_decay"] = phase.weight_decay
