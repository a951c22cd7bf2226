"""Weights, gradients and optimizer state sharded over the processes (FSDP), and gathered again to be saved.

The result is that of data-parallel training. All processes must run equally many forward and backward passes.

Source: FSDP, arXiv:2304.11277 (torch's ``fully_shard``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from quiver.encoder.training.processes import Processes

logger = logging.getLogger(__name__)


def shard(module: nn.Module, blocks: Iterable[nn.Module], processes: Processes, device: torch.device) -> None:
    """Shard the weights of a module in place; call it before an optimizer is made over them."""
    from torch.distributed.device_mesh import init_device_mesh  # slow imports that one process does not need
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes.size,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    weights = list(module.parameters())
    own = sum(weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel() for weight in weights)
    logger.info("process %d holds %s of %s weights", processes.rank, f"{own:,}", f"{sum(weight.numel() for weight in weights):,}")


def reshard(module: nn.Module) -> None:
    """Split the weights again that a forward pass without a backward pass has left whole; no effect on a module that is not sharded."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that is sharded over the processes, all of which must call this; return any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    full: Tensor = tensor.full_tensor()
    return full


def like_weight(value: Any, weight: Tensor) -> Any:
    """A tensor of a weight's shape, sharded as the weight is; any other value, or that of a whole weight, unchanged."""
    if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.shape == weight.shape and value.ndim:
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
    return value


def whole_weights(module: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Gather copies of the state of a module in CPU memory, one tensor at a time; empty without ``keep``. Called by all processes."""
    found = {}
    for name, tensor in module.state_dict().items():
        full = whole_tensor(tensor)
        if keep:
            found[name] = full.detach().to("cpu", copy=True)
    return found


def whole_optimizer_state(optimizer: Optimizer, *, keep: bool = True) -> dict[str, Any]:
    """Return the optimizer state of the whole weights; called by all processes."""

    def gathered(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        full = whole_tensor(value)
        return full.cpu() if keep else None

    state = optimizer.state_dict()
    slots = {number: {name: gathered(value) for name, value in held.items()} for number, held in state["state"].items()}
    return {**state, "state": slots}


def load_whole_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state of `whole_optimizer_state`; all processes call it with the same state."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    slots = {number: {name: like_weight(value, weights[number]) for name, value in held.items()} for number, held in state["state"].items()}
    optimizer.load_state_dict({**state, "state": slots})
