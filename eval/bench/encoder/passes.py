"""One pass over a set, and how far apart two libraries' numbers are.

Shapes: N real tokens of a batch, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quiver.eval.bench.encoder.libraries import Batch, Loaded
from quiver.eval.bench.encoder.results import OWN
from quiver.eval.bench.encoder.rounds import Pass, naming_who_ran_out


@dataclass(frozen=True)
class Prepared:
    """A library with its batches of a set.

    Attributes:
        loaded: The library.
        batches: What its ``prepare`` gave, in the set's order.
    """

    loaded: Loaded
    batches: Sequence[Batch]

    def encode(self, *, train: bool) -> None:
        """Run all batches; return when the device has finished.

        Args:
            train: Forward and backward through a loss over all states, batch by batch, gradients dropped after each; dropout
                is as the architecture has it. Otherwise forward alone, without gradients.
        """
        if train:
            self.loaded.module.train()
            for batch in self.batches:
                _backward(batch)
                self.loaded.module.zero_grad(set_to_none=True)
            self.loaded.module.eval()
        else:
            with torch.inference_mode():
                for batch in self.batches:
                    batch.forward()
        if self.loaded.embedding.is_cuda:
            torch.cuda.synchronize()

    def gradient(self) -> Tensor:
        """The embedding's gradient on the first batch, (V, D) float32, without dropout."""
        self.loaded.module.eval()
        _backward(self.batches[0])
        gradient = self.loaded.embedding.grad
        if gradient is None:
            raise RuntimeError("the embedding has no gradient: this model cannot be trained")
        self.loaded.module.zero_grad(set_to_none=True)
        return gradient.float()


def _backward(batch: Batch) -> None:
    """Forward, a loss, backward.

    The loss is the mean square of each state's component along one fixed direction. The mean square of whole states would not do: a
    final LayerNorm makes it constant, and all gradients would be rounding.
    """
    states = batch.real(batch.forward()).float()
    direction = torch.linspace(-1, 1, states.shape[-1], device=states.device)
    loss = (states @ direction).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]


def timed(library: str, prepared: Prepared, where: str, *, train: bool) -> Pass:
    """A pass for the clock; running out of memory names the library and the set."""

    def encode() -> None:
        with naming_who_ran_out(library, where):
            prepared.encode(train=train)

    return encode


@torch.no_grad()
def state_differences(libraries: Mapping[str, Prepared], where: str) -> dict[str, float]:
    """The largest absolute difference of each library's hidden states from Quiver's, over all real tokens of all batches."""
    differences = dict.fromkeys(libraries, 0.0)
    for place in range(len(libraries[OWN].batches)):
        reference = _states(OWN, libraries[OWN], place, where)
        for name, prepared in libraries.items():
            if name != OWN:
                apart = (_states(name, prepared, place, where) - reference).abs().max().item()
                differences[name] = max(differences[name], apart)
    return differences


def _states(library: str, prepared: Prepared, place: int, where: str) -> Tensor:
    batch = prepared.batches[place]
    with naming_who_ran_out(library, where):
        states = batch.real(batch.forward()).float()
    if not states.isfinite().all():  # no difference could be told, and a maximum would swallow it
        raise RuntimeError(f"{library}: hidden states that are not finite on {where}")
    return states


def gradient_differences(libraries: Mapping[str, Prepared], where: str) -> dict[str, float]:
    """The largest difference of each library's embedding gradient from Quiver's, as a share of Quiver's largest; first batch."""
    gradients = {}
    for name, prepared in libraries.items():
        with naming_who_ran_out(name, where):
            gradients[name] = prepared.gradient()
    reference = gradients[OWN]
    return {name: ((each - reference).abs().max() / reference.abs().max()).item() for name, each in gradients.items()}
