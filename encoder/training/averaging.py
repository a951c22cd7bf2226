"""Averages of weights: of several checkpoints, or an exponential moving average over all steps.

Sources: averaging of the last checkpoints as in the Transformer, arXiv:1706.03762, section 6.1, and JaColBERTv2.5, arXiv:2407.20750;
ModernBERT, arXiv:2412.13663, appendix A.2 (the base model is the mean of the three best checkpoints of the decay and the last).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quiver.encoder.training.sharding import like_weight, whole_tensor


def average_weights(models: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of the tensors of several models, at least one, with equal names and shapes, summed in float64 and rounded once.

    A generator that loads models keeps one of them in memory beside the sum. Tensors without a fraction are those of the first model.
    """
    iterator = iter(models)
    first = next(iterator)
    dtypes = {name: tensor.dtype for name, tensor in first.items()}
    sums = {name: tensor.detach().double() if tensor.is_floating_point() else tensor for name, tensor in first.items()}
    del first
    count = 1
    for model in iterator:
        count += 1
        for name, dtype in dtypes.items():
            if dtype.is_floating_point:
                sums[name] += model[name].detach()
    return {name: (sums[name] / count).to(dtype) if dtype.is_floating_point else sums[name] for name, dtype in dtypes.items()}


class MovingAverage:
    """An exponential moving average of a model's weights, in their own dtypes."""

    def __init__(self, model: nn.Module, *, half_life: float) -> None:
        self._new = 1.0 - 0.5 ** (1.0 / half_life)
        self._mean = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Include the weights after an optimizer step."""
        for name, weight in model.named_parameters():
            self._mean[name].lerp_(weight, self._new)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Replace the weights of a model by the average."""
        for name, weight in model.named_parameters():
            weight.copy_(self._mean[name])

    def state(self) -> dict[str, Tensor]:
        """The average by name, whole; called by all processes."""
        return {name: whole_tensor(mean) for name, mean in self._mean.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        for name, mean in self._mean.items():
            mean.copy_(like_weight(state[name], mean))
