"""Fully sharded data-parallel training (FSDP): no process holds more than its share of weights, gradients and optimiser state.

Each block of the encoder is brought together when its turn comes, forward and backward, and taken apart again behind it; the rest
(embedding, last norm, projections) is together while a batch lasts. What is computed is what data-parallel training computes.

Source: arXiv:2304.11277; torch's ``fully_shard``, https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from quiver.encoder.model import Encoder
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.trainer import whole_tensor
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shards:
    """A model whose weights are shared out over the processes.

    Attributes:
        model: Ours; its weights are shares.
        whole: In the process that leads a copy in the memory of the machine, for saving and scoring; elsewhere None.
    """

    model: BiEncoder | ColBERT
    whole: BiEncoder | ColBERT | None

    @contextmanager
    def together(self) -> Iterator[BiEncoder | ColBERT | None]:
        """The model with whole weights, in the process that leads, where the shares lie too; all processes enter together."""
        shares, whole = _modules(self.model), None if self.whole is None else _modules(self.whole)
        for place, weight in enumerate(_weights(shares)):
            full = whole_tensor(weight.detach())  # all of them take part; one weight at a time
            if whole is not None:
                _weights(whole)[place].data.copy_(full)
        if self.whole is None or whole is None:
            yield None
            return
        for module in whole:
            module.to(self.model.encoder.device).eval()
        try:
            # Without what an earlier one has cached, its fingerprint above all.
            yield type(self.whole)(self.whole.encoder, self.whole.tokenizer, self.whole.settings, source=self.whole.source)
        finally:
            for module in whole:
                module.to("cpu")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimiser's state as one over whole weights has it, in the process that leads; all processes call it."""
        state = optimizer.state_dict()
        slots = {
            number: {name: self._kept(value) if isinstance(value, DTensor) else value for name, value in held.items()}
            for number, held in state["state"].items()
        }
        return {**state, "state": slots}

    def load_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Put back what `optimizer_state` gave; all processes call it with the same state."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        slots = {number: {name: _share(value, weights[number]) for name, value in held.items()} for number, held in state["state"].items()}
        optimizer.load_state_dict({**state, "state": slots})

    def _kept(self, value: DTensor) -> Tensor | None:
        full = whole_tensor(value)
        return None if self.whole is None else full.cpu()


def shard(model: BiEncoder | ColBERT, library: nn.Module, processes: Processes) -> Shards:
    """Share a model's weights out, in place, before an optimiser is made over them.

    Args:
        model: Ours, the same in all processes.
        library: The same weights as the trainer calls them.
        processes: Two or more.
    """
    whole = _copied(model) if processes.is_main_process else None
    mesh = init_device_mesh(model.encoder.device.type, (processes.size,))
    if isinstance(model.encoder, Encoder):
        for block in model.encoder.layers:
            fully_shard(block, mesh=mesh)
    fully_shard(library, mesh=mesh)
    every = list(library.parameters())
    own = sum(weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel() for weight in every)
    logger.info("process %d has %s of %s weights", processes.rank, f"{own:,}", f"{sum(weight.numel() for weight in every):,}")
    return Shards(model, whole)


def _share(value: object, weight: Tensor) -> object:
    """A tensor as large as a weight as shares of it, laid out as the weight's; anything else as it is."""
    if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.shape == weight.shape and value.ndim:
        return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
    return value


def _modules(model: BiEncoder | ColBERT) -> tuple[nn.Module, nn.Module]:
    return model.encoder, model.projections


def _weights(modules: tuple[nn.Module, ...]) -> list[nn.Parameter]:
    return [weight for module in modules for weight in module.parameters()]


def _copied(model: BiEncoder | ColBERT) -> BiEncoder | ColBERT:
    encoder = copy.deepcopy(model.encoder).to("cpu")
    settings = replace(model.settings, projections=tuple(copy.deepcopy(one).to("cpu") for one in model.settings.projections))
    return type(model)(encoder, model.tokenizer, settings, source=model.source)
