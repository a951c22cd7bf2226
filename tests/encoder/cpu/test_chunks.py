"""Blocks by PyTorch operators in chunks of tokens, against `Block.forward` over all tokens at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quiver.encoder import Encoder, PackedBatch, optimize_for_inference
from quiver.encoder.config import Precision
from quiver.encoder.cpu.blocks import CHUNK
from quiver.encoder.cpu.support import assume
from quiver.encoder.lora import add_lora

LENGTHS = (CHUNK - 100, 230, 1)
"""Two chunks, the second of 131 tokens; a sequence lies in both."""

CONFIGS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_position": "post", "final_norm": False, "first_attention_norm": True, "qkv_bias": True, "mlp_output_bias": True},
    "parallel": {"norm_position": "parallel", "first_attention_norm": True},
    "alibi": {"positions": "alibi", "layer_types": ("global",) * 2},
    "plain mlp": {"mlp": "plain", "norm": "rmsnorm"},
}


@pytest.fixture(autouse=True)
def operators() -> Iterator[None]:
    with assume(kernels_run=False), torch.no_grad():
        yield


@pytest.fixture
def batch(batch_of: Callable[..., PackedBatch]) -> PackedBatch:
    return batch_of(LENGTHS)


def whole(encoder: Encoder, batch: PackedBatch) -> Tensor:
    """Encode with gradients, which no chunks are taken for."""
    with torch.enable_grad():
        return encoder(batch).detach()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_states_are_those_of_block_forward(
    encoder_of: Callable[..., Encoder], batch: PackedBatch, name: str, dtype: torch.dtype
) -> None:
    encoder = encoder_of(**CONFIGS[name]).to(dtype)
    exact = whole(copy.deepcopy(encoder).double(), batch)
    found, expected = (states.double() for states in (encoder(batch), whole(encoder, batch)))
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max() + 1e-12


@pytest.mark.parametrize("precision", ["float", "int8"])
def test_a_prepacked_encoder_gives_the_states_of_its_blocks(
    encoder_of: Callable[..., Encoder], batch: PackedBatch, precision: Precision
) -> None:
    encoder = encoder_of()
    optimize_for_inference(encoder, precision=precision)
    hooked = copy.deepcopy(encoder)
    for layer in hooked.layers:
        layer.register_forward_hook(lambda *_: None)  # such a block runs by its own forward
    torch.testing.assert_close(encoder(batch), hooked(batch), atol=1e-5, rtol=0)


def test_adapters_and_hooks_inside_a_block_take_part(encoder_of: Callable[..., Encoder], batch: PackedBatch) -> None:
    encoder = encoder_of().double()
    add_lora(encoder, rank=2, alpha=4, dropout=0.0, seed=1)
    for name, weight in encoder.named_parameters():
        if "lora" in name:
            weight.data.normal_(0, 0.3)
    shapes: list[torch.Size] = []
    encoder.layers[1].mlp.register_forward_hook(lambda _module, inputs, _output: shapes.append(inputs[0].shape))
    torch.testing.assert_close(encoder(batch), whole(encoder, batch), atol=1e-9, rtol=0)
    assert shapes == [torch.Size((sum(LENGTHS), 96))] * 2


def test_a_replaced_mlp_is_called(encoder_of: Callable[..., Encoder], batch: PackedBatch) -> None:
    encoder = encoder_of()
    for layer in encoder.layers:
        layer.mlp.forward = torch.zeros_like
    without = encoder_of()  # the same weights, and the original MLPs
    for layer in without.layers:
        nn.init.zeros_(layer.mlp.down.weight)
    torch.testing.assert_close(encoder(batch), whole(without, batch), atol=1e-5, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Records the number of values of the largest tensor that an operator returns."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.size = max([self.size, *(each.numel() for each in tensors)])
        return result


def test_the_states_inside_the_mlp_are_never_as_long_as_the_batch(encoder_of: Callable[..., Encoder], batch: PackedBatch) -> None:
    encoder = encoder_of(intermediate_size=480, layer_types=("local",) * 2, window=8)
    whole_batch = sum(LENGTHS) * 2 * 480
    with LargestTensor() as seen:
        encoder(batch)
    assert seen.size < whole_batch
    with LargestTensor() as seen:
        whole(encoder, batch)
    assert seen.size >= whole_batch
