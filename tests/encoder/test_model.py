"""The encoder as a whole: its length limit, initial weights, and hooks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, optimize_for_inference, pack_ids

CONFIG = EncoderConfig.modernbert(
    vocab_size=100, hidden_size=48, num_heads=3, intermediate_size=64, layer_types=["global", "local", "local", "global"], max_positions=300
)


@pytest.fixture
def encoder() -> Encoder:
    return init_weights(Encoder(CONFIG), seed=3).eval()


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 100, (length,), generator=generator).tolist() for length in lengths]


def test_a_sequence_longer_than_the_positions_is_refused(encoder: Encoder) -> None:
    with pytest.raises(InputError, match="a sequence has 301 tokens, more than the encoder's 300 positions"):
        encoder(pack_ids(texts(5, 301)))


def test_initial_weights_follow_megatron() -> None:
    config = EncoderConfig.modernbert(
        vocab_size=512, hidden_size=256, num_heads=4, intermediate_size=384, layer_types=["global", "local"] * 4, max_positions=64
    )
    encoder = init_weights(Encoder(config), seed=1)
    # A normal truncated at two deviations has 0.88 of its deviation left.
    shrink = 0.8796
    for name, weight in encoder.named_parameters():
        if weight.ndim == 1:
            assert (weight == 1).all(), name
            continue
        std = 0.02 / math.sqrt(16) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        assert weight.abs().max() <= 2 * std * 1.0001, name
        assert weight.std().item() == pytest.approx(shrink * std, rel=0.02), name
    again = init_weights(Encoder(config), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(encoder.parameters(), again.parameters(), strict=True))
    other = init_weights(Encoder(config), seed=2)
    assert not torch.equal(encoder.embeddings.tokens.weight, other.embeddings.tokens.weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_cpus_states(encoder: Encoder) -> None:
    batch = pack_ids(texts(1, 200, 64, 3, 65, 300))
    with torch.inference_mode():
        expected = encoder(batch)
        torch.testing.assert_close(encoder.to("cuda")(batch).cpu(), expected, atol=1e-4, rtol=0)


POSITIONS = ("pre", "post", "parallel")


def family(norm_position: str) -> EncoderConfig:
    positions = {"norm_position": norm_position, "final_norm": norm_position != "post"}
    return replace(CONFIG, **({} if norm_position == "pre" else positions | {"embedding_norm": True, "first_attention_norm": True}))


@pytest.mark.parametrize("norm_position", POSITIONS)
@pytest.mark.parametrize("lengths", [(5,), (300, 120, 7)])
@pytest.mark.parametrize("optimized", [None, "float", "int8"])
def test_forward_hooks_fire_in_inference_as_often_as_with_gradients(
    norm_position: str, lengths: tuple[int, ...], optimized: str | None
) -> None:
    encoder = init_weights(Encoder(family(norm_position)), seed=3).eval()
    batch = pack_ids(texts(*lengths))
    with torch.inference_mode():
        plain = encoder(batch)
    fired: list[str] = []
    modules = {"block": encoder.layers[1], "attention": encoder.layers[2].attention, "mlp": encoder.layers[3].mlp}
    for name, module in modules.items():
        module.register_forward_hook(lambda module, inputs, output, name=name: fired.append(name))
    encoder.layers[0].register_forward_pre_hook(lambda module, inputs: fired.append("before"))
    wanted = ["before", *modules]
    encoder(batch)
    assert fired == wanted
    if optimized is not None:
        optimize_for_inference(encoder, precision=optimized)
    fired.clear()
    with torch.inference_mode():
        states = encoder(batch)
    assert fired == wanted
    torch.testing.assert_close(states, plain, atol=2e-5 if optimized != "int8" else 0.3, rtol=0)


def test_what_a_forward_hook_returns_takes_the_place_of_the_output(encoder: Encoder) -> None:
    batch = pack_ids(texts(300, 64))
    handle = encoder.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 0)
    expected = encoder(batch).detach()
    with torch.inference_mode():
        changed = encoder(batch)
        handle.remove()
        plain = encoder(batch)
    torch.testing.assert_close(changed, expected, atol=2e-5, rtol=0)
    assert (changed - plain).abs().max() > 1e-3
