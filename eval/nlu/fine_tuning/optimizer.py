"""AdamW over a head and its encoder, and the learning rate of each update: a rise and a fall, each in a line.

Source: AdamW, arXiv:1711.05101; BERT, arXiv:1810.04805, appendix A.2, for the schedule. Decay in proportion to the learning rate's share
of its peak: section 3 of AdamW's paper, and Composer's DecoupledAdamW, which ModernBERT's release fine-tunes with.
"""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW

from quiver.eval.nlu.fine_tuning.sections import FineTuningSection, UpdatesSection


def make_optimizer(model: nn.Module, updates: UpdatesSection, training: FineTuningSection) -> AdamW:
    """The optimiser of all of a model's weights.

    Args:
        model: Its matrices decay, its vectors (norms, biases) do not.
        updates: Learning rate and decay.
        training: Betas, epsilon, and what the decay is a share of.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    # AdamW takes learning rate x decay off a weight, so a decay divided by the peak leaves the learning rate's share of the peak.
    decay = updates.weight_decay / updates.learning_rate if training.decoupled_decay else updates.weight_decay
    return AdamW(
        [
            {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": decay},
            {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
        ],
        lr=updates.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.eps,
    )


def learning_rate_share(step: int, steps: int, *, warmup_ratio: float) -> float:
    """Share of the peak learning rate that an update is done with.

    Args:
        step: Number of the update, from 1.
        steps: Updates of the whole run.
        warmup_ratio: Share of them over which it rises.

    Returns:
        Above 0, and 1 where the rise ends and the fall begins.

    Example:
        >>> [learning_rate_share(step, 6, warmup_ratio=0.3) for step in range(1, 7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = math.ceil(steps * warmup_ratio)
    return step / warmup if step <= warmup else (steps - step + 1) / (steps - warmup)


def set_learning_rate(optimizer: AdamW, learning_rate: float) -> None:
    """Make an optimiser ready for an update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
