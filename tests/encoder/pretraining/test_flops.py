"""The arithmetic of training against torch's own counter, pairs of tokens counted one by one, and which GPU has which peak."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quiver.encoder import Encoder, EncoderConfig, MaskedLM, init_weights, pack_ids
from quiver.encoder.pretraining.task import peak_flops, training_flops

CONFIG = EncoderConfig.modernbert(
    vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local", "local"], window=8
)


def test_products_of_matrices_are_those_that_torch_counts() -> None:
    """All but attention, which over sequences of one token has no product to count."""
    model = MaskedLM(init_weights(Encoder(CONFIG), seed=1))
    labels = torch.where(torch.arange(12) % 3 == 0, 5, -100)
    with FlopCounterMode(display=False) as counter:
        model(pack_ids([[7]] * 12), labels).loss.backward()
    attention = 6 * 3 * 2 * 32 * 12
    uncounted = 2 * 4 * 32 * 64  # torch knows addmm but not addmm_, by which the decoder's gradient is summed
    assert training_flops(CONFIG, [1] * 12, masked=4) == counter.get_total_flops() + attention + uncounted


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 30])
def test_pairs_are_those_that_see_each_other(length: int) -> None:
    near = sum(abs(i - j) <= 4 for i in range(length) for j in range(length))
    alone = 6 * length * 3 * (4 * 32 * 32 + 3 * 32 * 48)
    assert training_flops(CONFIG, [length], masked=0) - alone == 6 * 2 * 32 * (length * length + 2 * near)


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.4e12), ("NVIDIA H100 80GB HBM3", 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12)],
)
def test_the_peak_of_a_gpu(monkeypatch: pytest.MonkeyPatch, name: str, peak: float) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_flops() == peak


def test_a_peak_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Another GPU")
    assert peak_flops() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert peak_flops() is None
