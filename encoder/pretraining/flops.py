"""How much arithmetic a model's training is, to tell what share of a device's peak it reaches (model FLOP utilisation).

Counted are the products of matrices that the model consists of, a multiplication and an addition each; for attention over the pairs of
tokens that see each other. What is computed a second time to save memory is not counted, nor is what an implementation computes and masks.

Shapes: n tokens of a sequence, D model width, I MLP width, V vocabulary, M tokens whose word is asked for.
Source: PaLM, arXiv:2204.02311, appendix B (utilisation); the peaks are the makers' data sheets', bfloat16 without sparsity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from quiver.encoder.config import EncoderConfig

PEAKS: Mapping[str, float] = {
    "B200": 2.25e15,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
}
"""Part of a GPU's name -> operations a second; the first that fits."""


def training_flops(config: EncoderConfig, lengths: Sequence[int], *, asked: int) -> float:
    """Operations of the forward and the backward pass of a masked language model.

    Args:
        config: Of its encoder.
        lengths: n of each sequence.
        asked: M; of the other tokens no word is guessed.

    Example:
        >>> config = EncoderConfig.modernbert(
        ...     vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"])
        >>> 2 * 3 * (10 * (4 * 32 * 32 + 3 * 32 * 48) + 2 * 32 * 10 * 10 + 2 * (32 * 32 + 32 * 64)) == training_flops(config, [10], asked=2)
        True
    """
    width, tokens = config.hidden_size, sum(lengths)
    matrices = 4 * width**2 + (3 if config.mlp == "gated" else 2) * width * config.intermediate_size
    forward = tokens * matrices * config.num_layers
    seen = {"global": sum(length * length for length in lengths), "local": sum(_pairs(length, config.window // 2) for length in lengths)}
    forward += sum(2 * width * seen[kind] for kind in config.layer_types)  # scores, and the sum of values
    forward += asked * (width**2 + width * config.vocab_size)
    return 3.0 * 2.0 * forward  # the backward pass has two products for each of the forward pass


def _pairs(length: int, reach: int) -> int:
    """Pairs of tokens of a sequence that are at most so far apart, either order, each with itself too."""
    reach = min(reach, length - 1)
    return length + 2 * reach * length - reach * (reach + 1)


def peak_flops() -> float | None:
    """Operations in bfloat16 that this process's GPU does a second at best; None without a GPU, or for one that is not in `PEAKS`."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)
