"""Training FLOPs against torch's counter, attention pairs against a direct count, and peak throughput by GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from quiver.encoder import Encoder, EncoderConfig, MaskedLM, init_weights, pack_ids
from quiver.encoder.pretraining.task import peak_flops, training_flops

CONFIG = EncoderConfig.modernbert(
    vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local", "local"], window=8
)


def test_matrix_products_equal_the_count_of_torch() -> None:
    """Sequences have one token, so that attention has no products to count."""
    model = MaskedLM(init_weights(Encoder(CONFIG), seed=1))
    labels = torch.where(torch.arange(12) % 3 == 0, 5, -100)
    with FlopCounterMode(display=False) as counter:
        model(pack_ids([[7]] * 12), labels).loss.backward()
    attention = 6 * 3 * 2 * 32 * 12
    uncounted = 2 * 4 * 32 * 64  # torch knows addmm but not addmm_, which sums the decoder's gradient
    assert training_flops(CONFIG, [1] * 12, masked=4) == counter.get_total_flops() + attention + uncounted


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9, 30])
def test_attention_pairs_equal_a_direct_count(length: int) -> None:
    near = sum(abs(i - j) <= 4 for i in range(length) for j in range(length))
    alone = 6 * length * 3 * (4 * 32 * 32 + 3 * 32 * 48)
    assert training_flops(CONFIG, [length], masked=0) - alone == 6 * 2 * 32 * (length * length + 2 * near)


PEAKS = {"NVIDIA H200": 989.4e12, "NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12}


@pytest.mark.parametrize(("name", "peak"), [*PEAKS.items(), ("Another GPU", None), (None, None)])
def test_the_peak_throughput_of_a_gpu_is_known(monkeypatch: pytest.MonkeyPatch, name: str | None, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: name is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert peak_flops() == peak
