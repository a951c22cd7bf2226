"""The mean of weights over the end of a run: of its best checkpoints and the last, or exponentially over all updates.

Source: ModernBERT, arXiv:2412.13663, appendix A.2 (the base model is the mean of the three best checkpoints of the decay and the last).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.heads import MaskedLM


class MovingAverage:
    """An exponential moving average of a model's weights, in their own precision.

    Args:
        model: Whose weights it starts from.
        half_life: Updates after which a weight counts half.
    """

    def __init__(self, model: nn.Module, *, half_life: float) -> None:
        self._new = 1.0 - 0.5 ** (1.0 / half_life)
        self._mean = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights behind an update."""
        for name, weight in model.named_parameters():
            self._mean[name].lerp_(weight, self._new)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Give a model the average for its weights."""
        for name, weight in model.named_parameters():
            weight.copy_(self._mean[name])

    def state(self) -> dict[str, Tensor]:
        """The average by name, for `quiver.encoder.training.state`."""
        return dict(self._mean)

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what `state` gave."""
        for name, mean in self._mean.items():
            mean.copy_(state[name])


def mean_of_checkpoints(folders: Sequence[Path]) -> MaskedLM:
    """The mean of checkpoints of one phase; summed in float64, rounded once.

    Args:
        folders: At least one, each a masked language model of the same shape.
    """
    model = load_head(MaskedLM, folders[0])
    sums = {name: weight.detach().double() for name, weight in model.named_parameters()}
    for folder in folders[1:]:
        for name, weight in load_head(MaskedLM, folder).named_parameters():
            sums[name] += weight.detach()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(sums[name] / len(folders))
    return model
