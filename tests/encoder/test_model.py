"""The encoder as a whole: its formulas, batch composition, length limit, training, initial weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder import Encoder, EncoderConfig, InputError, init_weights, optimize_for_inference, pack_ids
from quiver.encoder.checkpoints import config_from_hf
from quiver.encoder.layers import alibi_slopes

CONFIG = EncoderConfig.modernbert(
    vocab_size=100, hidden_size=48, num_heads=3, intermediate_size=64, layer_types=["global", "local", "local", "global"], max_positions=300
)


@pytest.fixture
def encoder() -> Encoder:
    return init_weights(Encoder(CONFIG), seed=3).eval()


def texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 100, (length,), generator=generator).tolist() for length in lengths]


POST = EncoderConfig.bert(vocab_size=100, hidden_size=48, num_heads=3, intermediate_size=64, layers=2, max_positions=60)
DEFINED = {
    "modernbert": replace(CONFIG, window=8, global_theta=1000.0, local_theta=10.0, activation="gelu_tanh"),
    "biases and norms": replace(
        CONFIG, qkv_bias=True, mlp_output_bias=True, norm_bias=True, first_attention_norm=True, rotary_fraction=0.5
    ),
    "bert": replace(POST, family="roberta", position_offset=2),
    "alibi": replace(POST, positions="alibi", mlp="gated"),
    "parallel": replace(
        CONFIG, family="quiver", norm_position="parallel", norm="rmsnorm", mlp="plain", activation="silu", final_norm=False
    ),
}


def position_rows(ids: list[int], offset: int) -> list[int]:
    """Rows of the position table: RoBERTa, which has an offset, counts no padding tokens, and gives each the last row before the first."""
    rows, following = [], offset
    for token in ids:
        is_padding = offset > 0 and token == offset - 1
        rows.append(offset - 1 if is_padding else following)
        following += not is_padding
    return rows


def written_out(encoder: Encoder, ids: list[int]) -> Tensor:  # noqa: C901 - one formula per function, all in one place
    """The hidden states of one text in double precision, formula by formula, with matrices of all pairs of tokens."""
    config, weights = encoder.config, {name: weight.double() for name, weight in encoder.state_dict().items()}
    place = torch.arange(len(ids))
    distance = (place[:, None] - place).abs()

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].t() + weights.get(f"{name}.bias", torch.zeros(1))

    def norm(x: Tensor, name: str) -> Tensor:
        if f"{name}.weight" not in weights:
            return x
        x = x - x.mean(-1, keepdim=True) * (config.norm == "layernorm")
        x = x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()
        return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", torch.zeros(1))

    def rotated(x: Tensor, theta: float) -> Tensor:
        half = config.rotary_width // 2
        angle = place[:, None, None] / theta ** (torch.arange(half, dtype=torch.float64) / half)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin(), rest), -1)

    def attention(x: Tensor, layer: int) -> Tensor:
        q, k, v = linear(x, f"layers.{layer}.attention.qkv").view(len(ids), 3, config.num_heads, -1).unbind(1)
        if config.positions == "rope":
            theta = {"global": config.global_theta, "local": config.local_theta}[config.layer_types[layer]]
            q, k = rotated(q, theta), rotated(k, theta)
        scores = torch.einsum("ihk,jhk->hij", q, k) / q.shape[-1] ** 0.5
        if config.positions == "alibi":
            scores = scores - alibi_slopes(config.num_heads)[:, None, None] * distance
        if config.layer_types[layer] == "local":
            scores = scores.masked_fill(distance > config.window // 2, -math.inf)
        return linear(torch.einsum("hij,jhk->ihk", scores.softmax(-1), v).flatten(1), f"layers.{layer}.attention.out")

    def mlp(x: Tensor, layer: int) -> Tensor:
        inner, gate = linear(x, f"layers.{layer}.mlp.up"), torch.ones(())
        if config.mlp == "gated":
            inner, gate = inner.chunk(2, -1)
        activate = {"gelu": F.gelu, "silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[config.activation]
        return linear(activate(inner) * gate, f"layers.{layer}.mlp.down")

    hidden = weights["embeddings.tokens.weight"][ids]
    if config.positions == "absolute":
        hidden = hidden + weights["embeddings.positions.weight"][position_rows(ids, config.position_offset)]
    if config.type_vocab_size:
        hidden = hidden + weights["embeddings.token_types.weight"][0]
    hidden = norm(hidden, "embeddings.norm")
    for layer in range(config.num_layers):
        before_attention, before_mlp = f"layers.{layer}.attention_norm", f"layers.{layer}.mlp_norm"
        if config.norm_position == "post":
            hidden = norm(hidden + attention(hidden, layer), before_attention)
            hidden = norm(hidden + mlp(hidden, layer), before_mlp)
        elif config.norm_position == "pre":
            hidden = hidden + attention(norm(hidden, before_attention), layer)
            hidden = hidden + mlp(norm(hidden, before_mlp), layer)
        else:
            normed = norm(hidden, before_attention)
            hidden = hidden + attention(normed, layer) + mlp(normed, layer)
    return norm(hidden, "final_norm")


@pytest.mark.parametrize("name", DEFINED)
def test_states_are_those_of_the_formulas(name: str) -> None:
    encoder = Encoder(DEFINED[name]).double().eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # norms and biases that have an effect
        for key, weight in encoder.named_parameters():
            centre = 1.0 if "norm" in key and key.endswith("weight") else 0.0
            weight.normal_(centre, 0.3, generator=generator)
    sequences = texts(7, 40, 7)  # equal lengths apart: an encoder puts them side by side, and its states back into place
    with torch.no_grad():
        states = encoder(pack_ids(sequences))
        expected = torch.cat([written_out(encoder, ids) for ids in sequences])
    torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)  # the rotary tables are float32


@torch.inference_mode()
def test_states_do_not_depend_on_the_batch(encoder: Encoder) -> None:
    sequences = texts(1, 200, 64, 3, 65, 300)
    alone = [encoder(pack_ids([sequence])) for sequence in sequences]
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 5]):
        batch = pack_ids([sequences[row] for row in order])
        for row, states in zip(order, batch.unpack(encoder(batch)), strict=True):
            torch.testing.assert_close(states, alone[row], atol=2e-6, rtol=0)


def test_a_sequence_longer_than_the_positions_is_refused(encoder: Encoder) -> None:
    with pytest.raises(InputError, match="a sequence has 301 tokens, more than the encoder's 300 positions"):
        encoder(pack_ids(texts(5, 301)))


def test_every_weight_learns(encoder: Encoder) -> None:
    encoder.train()
    states = encoder(pack_ids(texts(150, 7, 40)))
    states.square().mean().backward()
    for name, weight in encoder.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name
        assert weight.grad.abs().sum() > 0, name


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


def test_dropout_only_works_in_training() -> None:
    config = config_from_hf(
        {
            "model_type": "bert",
            "vocab_size": 100,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.3,
            "attention_probs_dropout_prob": 0.3,
        }
    )
    encoder = init_weights(Encoder(config), seed=1)
    batch = pack_ids(texts(20, 30))
    encoder.eval()
    assert torch.equal(encoder(batch), encoder(batch))
    encoder.train()
    assert not torch.equal(encoder(batch), encoder(batch))


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
