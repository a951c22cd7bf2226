"""Members of the family that transformers does not have, against their papers' equations in plain padded torch.

The references below know nothing of Quiver: they read a checkpoint in its published names and work in float64 on a padded
batch. Shapes: B sequences, S tokens of the longest, D model width, H heads, K head width, R rotary width.

Source: MosaicBERT, arXiv:2312.17482; ALiBi, arXiv:2108.12409; RoFormer, arXiv:2104.09864, equation 34; GLU variants,
arXiv:2002.05202; NomicBERT, arXiv:2402.01613; GTE, arXiv:2407.19669; RMSNorm, arXiv:1910.07467; ModernBERT, arXiv:2412.13663.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quiver.encoder import Encoder, EncoderConfig, init_weights, load_encoder, pack_ids, save_encoder
from quiver.encoder.config import RopeScaling

pytestmark = pytest.mark.parity

LENGTHS = (1, 2, 63, 64, 65, 129, 200)
VOCABULARY = 128
State = dict[str, Tensor]
Activation = Callable[[Tensor], Tensor]


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return scaled if bias is None else scaled + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, frequencies: Tensor) -> Tensor:
    """Each pair (i, i + R/2) of a head's first R dimensions is a complex number that is turned by position * frequency."""
    half = len(frequencies)
    places = torch.arange(x.shape[2], dtype=torch.float64)
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])  # (B, H, S, R/2)
    pairs = pairs * torch.polar(torch.ones(1, dtype=torch.float64), torch.outer(places, frequencies))
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)


def frequencies(theta: float, width: int, scaling: tuple[str, float] | None = None) -> Tensor:
    """RoPE's; linear divides them by the factor; GTE's ntk takes theta * factor and divides by factor ** (2 / R)."""
    kind, factor = scaling or ("", 1.0)
    base = theta * factor if kind == "ntk" else theta
    divisor = {"": 1.0, "linear": factor, "ntk": factor ** (2 / width)}[kind]
    return torch.tensor([base ** (-2 * i / width) / divisor for i in range(width // 2)], dtype=torch.float64)


def attention(
    qkv: Tensor, mask: Tensor, heads: int, *, rope: Tensor | None = None, slopes: list[float] | None = None, window: int | None = None
) -> Tensor:
    """(B, S, 3 D), queries, keys and values each head by head, to (B, S, D)."""
    batch, length, _ = qkv.shape
    q, k, v = (part.view(batch, length, heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))  # (B, H, S, K)
    if rope is not None:
        q, k = turned(q, rope), turned(k, rope)
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    place = torch.arange(length)
    distance = (place[:, None] - place).abs()
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=torch.float64)[:, None, None] * distance
    hidden = ~mask[:, None, None, :]
    if window is not None:
        hidden = hidden | (distance > window // 2)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()  # rows of padding may see nothing
    return (weights @ v).transpose(1, 2).flatten(2)


def linear(state: State, name: str, x: Tensor) -> Tensor:
    product = x @ state[f"{name}.weight"].T
    return product + state[f"{name}.bias"] if f"{name}.bias" in state else product


def norm(state: State, name: str, x: Tensor, eps: float = 1e-12) -> Tensor:
    return layer_norm(x, state[f"{name}.weight"], state.get(f"{name}.bias"), eps)


def embed(state: State, ids: Tensor) -> Tensor:
    hidden = state["embeddings.word_embeddings.weight"][ids]
    types = state.get("embeddings.token_type_embeddings.weight")
    return hidden if types is None else hidden + types[0]


def mosaicbert(state: State, ids: Tensor, mask: Tensor, *, heads: int, slopes: list[float], layers: int) -> Tensor:
    hidden = norm(state, "embeddings.LayerNorm", embed(state, ids))
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        mixed = attention(linear(state, f"{name}.attention.self.Wqkv", hidden), mask, heads, slopes=slopes)
        mixed = linear(state, f"{name}.attention.output.dense", mixed)
        hidden = norm(state, f"{name}.attention.output.LayerNorm", hidden + mixed)
        first, second = linear(state, f"{name}.mlp.gated_layers", hidden).chunk(2, dim=-1)
        hidden = norm(state, f"{name}.mlp.layernorm", hidden + linear(state, f"{name}.mlp.wo", gelu(first) * second))
    return hidden


def nomicbert(
    state: State, ids: Tensor, mask: Tensor, *, heads: int, rope: Tensor, activation: Activation, gated: bool, layers: int
) -> Tensor:
    hidden = norm(state, "emb_ln", embed(state, ids))
    for layer in range(layers):
        name = f"encoder.layers.{layer}"
        mixed = attention(linear(state, f"{name}.attn.Wqkv", hidden), mask, heads, rope=rope)
        hidden = norm(state, f"{name}.norm1", hidden + linear(state, f"{name}.attn.out_proj", mixed))
        if gated:
            inner = linear(state, f"{name}.mlp.fc11", hidden) * activation(linear(state, f"{name}.mlp.fc12", hidden))
        else:
            inner = activation(linear(state, f"{name}.mlp.fc1", hidden))
        hidden = norm(state, f"{name}.norm2", hidden + linear(state, f"{name}.mlp.fc2", inner))
    return hidden


def gte(state: State, ids: Tensor, mask: Tensor, *, heads: int, rope: Tensor, layers: int) -> Tensor:
    hidden = norm(state, "embeddings.LayerNorm", embed(state, ids))
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        mixed = attention(linear(state, f"{name}.attention.qkv_proj", hidden), mask, heads, rope=rope)
        hidden = norm(state, f"{name}.attn_ln", hidden + linear(state, f"{name}.attention.o_proj", mixed))
        up, gate = linear(state, f"{name}.mlp.up_gate_proj", hidden).chunk(2, dim=-1)
        hidden = norm(state, f"{name}.mlp_ln", hidden + linear(state, f"{name}.mlp.down_proj", gelu(gate) * up))
    return hidden


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def padded() -> tuple[Tensor, Tensor]:
    """Ids and mask, (B, S) each."""
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, text in enumerate(texts()):
        ids[row, : len(text)] = torch.tensor(text)
    return ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def checkpoint(folder: Path, hf: dict[str, object], shapes: dict[str, tuple[int, ...]], *, prefix: str = "", seed: int = 0) -> State:
    """Write random tensors of these shapes; norms (one dimension, .weight) around 1. Returns them in float64."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else 0.12) for name, shape in shapes.items()}
    state = {name: tensor + 1 if name.endswith("weight") and tensor.ndim == 1 else tensor for name, tensor in state.items()}
    save_file({prefix + name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(hf))
    return {name: tensor.double() for name, tensor in state.items()}


def with_biases(weights: dict[str, tuple[int, ...]], without: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Tensor shapes of modules by the shapes of their weights; all but embeddings and those named have a bias."""
    shapes = {f"{name}.weight": shape for name, shape in weights.items()}
    plain = ("word_embeddings", "token_type_embeddings", *without)
    return shapes | {f"{name}.bias": shape[:1] for name, shape in weights.items() if not name.endswith(plain)}


def compare(encoder: Encoder, expected: Tensor, mask: Tensor, *, atol: float = 1e-5) -> None:
    """Our packed states against the reference's where there is no padding, in inference and in training."""
    batch = pack_ids(texts())
    with torch.no_grad():
        torch.testing.assert_close(encoder(batch), expected[mask].float(), atol=atol, rtol=0)
    torch.testing.assert_close(encoder(batch).detach(), expected[mask].float(), atol=atol, rtol=0)


# Two heads: 2^-4, 2^-8. Three: those, then the first of four heads' slopes. Twelve: eight heads', then 16 heads' 1st, 3rd, 5th, 7th.
SLOPES = {
    2: [1 / 16, 1 / 256],
    3: [1 / 16, 1 / 256, 1 / 4],
    4: [1 / 4, 1 / 16, 1 / 64, 1 / 256],
    12: [*(2.0**-i for i in range(1, 9)), *(2.0**-i for i in (0.5, 1.5, 2.5, 3.5))],
}


@pytest.mark.parametrize("heads", SLOPES)
@pytest.mark.parametrize("prefix", ["", "bert."])
def test_mosaicbert(tmp_path: Path, heads: int, prefix: str) -> None:
    width, inner, layers = 48, 80, 2
    weights = {"embeddings.word_embeddings": (VOCABULARY, width), "embeddings.token_type_embeddings": (2, width)}
    weights["embeddings.LayerNorm"] = (width,)
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        weights |= {f"{name}.attention.self.Wqkv": (3 * width, width), f"{name}.attention.output.dense": (width, width)}
        weights |= {f"{name}.attention.output.LayerNorm": (width,), f"{name}.mlp.layernorm": (width,)}
        weights |= {f"{name}.mlp.gated_layers": (2 * inner, width), f"{name}.mlp.wo": (width, inner)}
    hf = {"model_type": "bert", "vocab_size": VOCABULARY, "hidden_size": width, "num_attention_heads": heads, "hidden_act": "gelu"}
    hf |= {"num_hidden_layers": layers, "intermediate_size": inner, "max_position_embeddings": 64, "alibi_starting_size": 256}
    hf |= {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "position_embedding_type": "absolute"}
    state = checkpoint(tmp_path, hf, with_biases(weights, without=("gated_layers",)), prefix=prefix)
    ids, mask = padded()
    compare(load_encoder(tmp_path), mosaicbert(state, ids, mask, heads=heads, slopes=SLOPES[heads], layers=layers), mask)


@pytest.mark.parametrize(
    ("change", "prefix"),
    [
        ({}, "bert."),
        ({"qkv_proj_bias": True, "mlp_fc1_bias": True, "mlp_fc2_bias": True, "activation_function": "geglu"}, ""),
        ({"activation_function": "gelu", "mlp_fc1_bias": True, "type_vocab_size": 0}, ""),
        ({"rotary_emb_fraction": 0.5, "rotary_emb_base": 500_000}, "bert."),
    ],
    ids=["published", "geglu with biases", "plain", "half the width turned"],
)
def test_nomicbert(tmp_path: Path, change: dict[str, object], prefix: str) -> None:
    width, inner, layers, heads = 64, 256, 2, 2
    hf = {"model_type": "nomic_bert", "vocab_size": VOCABULARY - 5, "pad_vocab_size_multiple": 64, "n_embd": width, "n_head": heads}
    hf |= {"n_inner": inner, "n_layer": layers, "n_positions": 256, "activation_function": "swiglu", "layer_norm_epsilon": 1e-12}
    hf |= {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "type_vocab_size": 2}
    hf |= {"rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "rotary_scaling_factor": None, **change}
    gated = hf["activation_function"] != "gelu"
    weights = {"embeddings.word_embeddings": (VOCABULARY, width), "emb_ln": (width,)}
    if hf["type_vocab_size"]:
        weights["embeddings.token_type_embeddings"] = (2, width)
    for layer in range(layers):
        name = f"encoder.layers.{layer}"
        weights |= {f"{name}.attn.Wqkv": (3 * width, width), f"{name}.attn.out_proj": (width, width), f"{name}.norm1": (width,)}
        weights |= {f"{name}.mlp.{up}": (inner, width) for up in (("fc11", "fc12") if gated else ("fc1",))}
        weights |= {f"{name}.mlp.fc2": (width, inner), f"{name}.norm2": (width,)}
    off = {"qkv_proj_bias": ("Wqkv", "out_proj"), "mlp_fc1_bias": ("fc11", "fc12", "fc1"), "mlp_fc2_bias": ("fc2",)}
    without = tuple(name for key, names in off.items() if not hf[key] for name in names)
    state = checkpoint(tmp_path, hf, with_biases(weights, without=without), prefix=prefix)
    ids, mask = padded()
    rope = frequencies(float(hf["rotary_emb_base"]), int(width / heads * hf["rotary_emb_fraction"]))
    activation = silu if hf["activation_function"] == "swiglu" else gelu
    expected = nomicbert(state, ids, mask, heads=heads, rope=rope, activation=activation, gated=gated, layers=layers)
    compare(load_encoder(tmp_path), expected, mask)


@pytest.mark.parametrize("factor", [None, 2.0, 8.0])
@pytest.mark.parametrize(("types", "prefix"), [(0, "new."), (2, "")])
def test_gte(tmp_path: Path, factor: float | None, types: int, prefix: str) -> None:
    width, inner, layers, heads = 64, 96, 2, 2
    weights = {"embeddings.word_embeddings": (VOCABULARY, width), "embeddings.LayerNorm": (width,)}
    if types:
        weights["embeddings.token_type_embeddings"] = (types, width)
    for layer in range(layers):
        name = f"encoder.layer.{layer}"
        weights |= {f"{name}.attention.qkv_proj": (3 * width, width), f"{name}.attention.o_proj": (width, width)}
        weights |= {f"{name}.attn_ln": (width,), f"{name}.mlp_ln": (width,)}
        weights |= {f"{name}.mlp.up_gate_proj": (2 * inner, width), f"{name}.mlp.down_proj": (width, inner)}
    hf = {"model_type": "new", "vocab_size": VOCABULARY, "hidden_size": width, "num_attention_heads": heads, "hidden_act": "gelu"}
    hf |= {"num_hidden_layers": layers, "intermediate_size": inner, "max_position_embeddings": 256, "rope_theta": 500_000}
    hf |= {"type_vocab_size": types, "layer_norm_eps": 1e-12, "rope_scaling": factor and {"type": "ntk", "factor": factor}}
    state = checkpoint(tmp_path, hf, with_biases(weights, without=("up_gate_proj",)), prefix=prefix)
    ids, mask = padded()
    rope = frequencies(500_000.0, width // heads, factor and ("ntk", factor))
    compare(load_encoder(tmp_path), gte(state, ids, mask, heads=heads, rope=rope, layers=layers), mask)


# FlexBERT: ModernBERT with one switch or two thrown.
BASE = EncoderConfig(
    family="quiver",
    vocab_size=VOCABULARY,
    hidden_size=64,
    num_heads=2,
    intermediate_size=96,
    layer_types=("global", "local", "local"),
    max_positions=256,
    norm_position="pre",
    mlp="gated",
    positions="rope",
    window=32,
    global_theta=30_000.0,
    local_theta=500.0,
    first_attention_norm=False,
    final_norm=True,
)
ABLATIONS: dict[str, dict[str, object]] = {
    "modernbert": {},
    "rmsnorm": {"norm": "rmsnorm"},
    "half the width turned": {"rotary_fraction": 0.5},
    "three quarters turned": {"rotary_fraction": 0.75},
    "parallel": {"norm_position": "parallel"},
    "parallel, all switches": {
        "norm_position": "parallel",
        "norm": "rmsnorm",
        "rotary_fraction": 0.5,
        "mlp": "plain",
        "first_attention_norm": True,
        "layer_types": ("global",) * 3,
    },
    "plain MLP": {"mlp": "plain", "mlp_input_bias": True, "mlp_output_bias": True},
    "SwiGLU": {"activation": "silu"},
    "all global": {"layer_types": ("global",) * 3},
    "post-norm": {"norm_position": "post", "first_attention_norm": True, "final_norm": False, "norm_bias": True},
    "post-norm, rmsnorm": {"norm_position": "post", "first_attention_norm": True, "norm": "rmsnorm"},
    "no embedding norm": {"embedding_norm": False, "first_attention_norm": True},
    "alibi": {"positions": "alibi"},
    "linear and ntk scaling": {"global_scaling": RopeScaling("linear", 4.0, 64), "local_scaling": RopeScaling("ntk", 2.0, 128)},
    "biases": {"norm_bias": True, "qkv_bias": True, "attention_output_bias": True, "mlp_input_bias": True, "mlp_output_bias": True},
}


def flexbert(state: State, ids: Tensor, mask: Tensor, config: EncoderConfig) -> Tensor:
    def normed(name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in state:  # a norm that this model leaves away
            return x
        return rms_norm(x, state[f"{name}.weight"], config.norm_eps) if config.norm == "rmsnorm" else norm(state, name, x, config.norm_eps)

    def mlp(name: str, x: Tensor) -> Tensor:
        activation = {"gelu": gelu, "silu": silu}[config.activation]
        inner = linear(state, f"{name}.up", x)
        if config.mlp == "gated":
            first, second = inner.chunk(2, dim=-1)
            return linear(state, f"{name}.down", activation(first) * second)
        return linear(state, f"{name}.down", activation(inner))

    def mixed(layer: int, x: Tensor) -> Tensor:
        kind = config.layer_types[layer]
        rope = slopes = None
        if config.positions == "rope":
            scaling = config.global_scaling if kind == "global" else config.local_scaling
            theta = config.global_theta if kind == "global" else config.local_theta
            width = int(config.hidden_size / config.num_heads * config.rotary_fraction)
            rope = frequencies(theta, width, scaling and (scaling.kind, scaling.factor))
        else:
            slopes = SLOPES[config.num_heads]
        window = config.window if kind == "local" else None
        qkv = linear(state, f"layers.{layer}.attention.qkv", x)
        return linear(
            state, f"layers.{layer}.attention.out", attention(qkv, mask, config.num_heads, rope=rope, slopes=slopes, window=window)
        )

    hidden = normed("embeddings.norm", state["embeddings.tokens.weight"][ids])
    for layer in range(len(config.layer_types)):
        name = f"layers.{layer}"
        if config.norm_position == "post":
            hidden = normed(f"{name}.attention_norm", hidden + mixed(layer, hidden))
            hidden = normed(f"{name}.mlp_norm", hidden + mlp(f"{name}.mlp", hidden))
        elif config.norm_position == "parallel":
            once = normed(f"{name}.attention_norm", hidden)
            hidden = hidden + mixed(layer, once) + mlp(f"{name}.mlp", once)
        else:
            hidden = hidden + mixed(layer, normed(f"{name}.attention_norm", hidden))
            hidden = hidden + mlp(f"{name}.mlp", normed(f"{name}.mlp_norm", hidden))
    return normed("final_norm", hidden)


@pytest.mark.parametrize("change", ABLATIONS.values(), ids=ABLATIONS)
def test_flexberts_ablations(tmp_path: Path, change: dict[str, object]) -> None:
    config = replace(BASE, **change)
    source = init_weights(Encoder(config), seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in source.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * (0.2 if weight.ndim == 1 else 0.1))
    save_encoder(source, tmp_path)
    encoder = load_encoder(tmp_path)
    assert encoder.config == config
    state = {name: tensor.double().requires_grad_() for name, tensor in source.state_dict().items()}
    ids, mask = padded()
    expected = flexbert(state, ids, mask, config)
    compare(encoder, expected.detach(), mask)
    # And it trains: the gradients are the reference's.
    probe = torch.randn(expected[mask].shape, generator=generator)
    (expected[mask] * probe).mean().backward()
    (encoder(pack_ids(texts())) * probe).mean().backward()
    for name, weight in encoder.named_parameters():
        gradient = state[name].grad
        assert gradient is not None
        torch.testing.assert_close(
            weight.grad, gradient.float(), atol=1e-5 * gradient.abs().max().item(), rtol=1e-3, msg=f"{name} {{}}".format
        )
    # And the states of a text do not depend on the others of its batch.
    with torch.no_grad():
        alone = [encoder.eval()(pack_ids([text])) for text in texts()]
        for order in ([6, 5, 4, 3, 2, 1, 0], [2, 6, 0]):
            batch = pack_ids([texts()[row] for row in order])
            for row, states in zip(order, batch.unpack(encoder(batch)), strict=True):
                torch.testing.assert_close(states, alone[row], atol=5e-6 * max(1.0, alone[row].abs().max().item()), rtol=0)
