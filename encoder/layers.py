"""The parts of an encoder: positions, embeddings, attention, MLP, block. Each takes its sizes from one `EncoderConfig`.

The token-wise arithmetic between the matrix products (activations, gates, norms, rotary positions) runs on CUDA tensors as one Triton
kernel per operation (`quiver.encoder.gpu`), elsewhere as PyTorch operators; `choose_ops` decides which.

Shapes: N packed tokens, D model width, H heads, K head width, I MLP width, R leading dimensions of a head that RoPE rotates, P positions.
Source: ModernBERT, arXiv:2412.13663, section 2.1; BERT, arXiv:1810.04805, section 3; RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071;
ALiBi, arXiv:2108.12409; GLU Variants Improve Transformer, arXiv:2002.05202. The half-rotation layout is GPT-NeoX's, which ModernBERT uses:
dimension i is rotated together with dimension i + R/2.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from quiver.encoder.attention import attend
from quiver.encoder.config import EncoderConfig, RopeScaling
from quiver.encoder.cpu.linear import Linear
from quiver.encoder.errors import InputError
from quiver.encoder.packing import PackedBatch, PaddedBatch, join_qkv

logger = logging.getLogger(__name__)

OPS_VARIABLE = "QUIVER_OPS"
"""Environment variable that overrides the choice: torch or triton."""

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def choose_ops(device_type: str, dtype: torch.dtype, override: str | None = None) -> str:
    """Choose torch or triton for tensors of a device type and dtype; the choice is logged once. A wrong override is an InputError."""
    if override not in (None, "torch", "triton"):
        raise InputError(f"{OPS_VARIABLE} must be torch or triton, got {override!r}")
    installed = importlib.util.find_spec("triton") is not None
    if override == "triton" and not installed:
        raise InputError(f"{OPS_VARIABLE} is triton, which is not installed: install it or unset the variable")
    interpreted = override == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    able = installed and dtype in TRITON_DTYPES and (device_type == "cuda" or interpreted)
    name = "triton" if able and override != "torch" else "torch"
    logger.info("token-wise arithmetic on %s in %s: %s", device_type, str(dtype).removeprefix("torch."), name)
    return name


def use_triton(x: Tensor) -> bool:
    """Return whether a Triton kernel processes ``x``."""
    if torch.compiler.is_compiling() or not x.numel():
        return False
    return choose_ops(x.device.type, x.dtype, os.environ.get(OPS_VARIABLE)) == "triton"


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}

ACTIVATION_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_tanh": lambda gradient, x: torch.ops.aten.gelu_backward(gradient, x, approximate="tanh"),
    "silu": torch.ops.aten.silu_backward,
    "relu": lambda gradient, x: torch.ops.aten.threshold_backward(gradient, x, 0),
}
"""For each activation, the gradient of its input from the gradient of its output and the input."""


# Tokens per step on a CPU: the data that several passes share stays in its cache.
GATE_CHUNK = 256


def gated(up: Tensor, activation: str) -> Tensor:
    """Gate (N, 2 I): the activation of the first half times the second half, (N, I)."""
    if use_triton(up):
        from quiver.encoder.gpu import triton_tokens

        return triton_tokens.gated(up, activation)
    if up.device.type == "cpu" and torch.is_grad_enabled() and up.requires_grad and not torch.compiler.is_compiling():
        output: Tensor = _ChunkedGate.apply(up, activation)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output
    activated, gate = up.chunk(2, dim=-1)
    return ACTIVATION_FUNCTIONS[activation](activated) * gate


class _ChunkedGate(torch.autograd.Function):
    """The gate, a few tokens at a time, with its gradient in the layout that the preceding product needs."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, activation: str) -> Tensor:
        output = up.new_empty(len(up), up.shape[1] // 2)
        for part, place in zip(torch.split(up, GATE_CHUNK), torch.split(output, GATE_CHUNK), strict=True):
            first, gate = part.chunk(2, dim=-1)
            torch.mul(ACTIVATION_FUNCTIONS[activation](first), gate, out=place)
        ctx.activation = activation
        ctx.save_for_backward(up)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (up,) = ctx.saved_tensors
        of_up = up.new_empty(up.shape)
        for part, upstream, place in zip(*(torch.split(x, GATE_CHUNK) for x in (up, gradient, of_up)), strict=True):
            first, gate = part.chunk(2, dim=-1)
            of_first, of_gate = place.chunk(2, dim=-1)
            torch.mul(upstream, ACTIVATION_FUNCTIONS[ctx.activation](first), out=of_gate)
            of_first.copy_(ACTIVATION_GRADIENTS[ctx.activation](upstream * gate, first))
        return of_up, None


Norm = nn.LayerNorm | nn.RMSNorm | nn.Identity

# Largest D of the Triton kernel: a program holds a row in registers.
MAX_TRITON_WIDTH = 16384


def _use_triton_norm(hidden: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> bool:
    return use_triton(hidden) and hidden.shape[-1] <= MAX_TRITON_WIDTH and norm.eps is not None


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product reads ``x``: that of autocast where it is on, otherwise that of ``x``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def normalize(hidden: Tensor, norm: Norm) -> Tensor:
    """Normalize each token; the weights of the norm follow the dtype of the hidden states."""
    if isinstance(norm, nn.Identity):
        return hidden
    if _use_triton_norm(hidden, norm):
        return add_norm(hidden, None, norm)[1]
    weight = norm.weight.to(hidden.dtype)
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(hidden, tuple(norm.normalized_shape), weight, norm.eps)
    bias = None if norm.bias is None else norm.bias.to(hidden.dtype)
    return F.layer_norm(hidden, tuple(norm.normalized_shape), weight, bias, norm.eps)


def add_norm(
    hidden: Tensor, update: Tensor | None, norm: Norm, *, dropout: float = 0.0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Add an update, (N, D) or None, to the residual stream, (N, D), and normalize the sum; returns both.

    Without gradients the stream is overwritten by the sum. The norm's ``dtype`` defaults to that of the sum; under autocast a kernel writes
    the dtype of the product that reads it.
    """
    if not isinstance(norm, nn.Identity) and _use_triton_norm(hidden, norm):
        from quiver.encoder.gpu import triton_norms

        autocast = torch.is_autocast_enabled(hidden.device.type)
        return triton_norms.add_norm(hidden, update, norm, dropout=dropout, dtype=dtype or (product_dtype(hidden) if autocast else None))
    if update is not None:
        update = F.dropout(update, dropout) if dropout else update
        hidden = hidden + update if torch.is_grad_enabled() else hidden.add_(update)
    normed = normalize(hidden, norm)
    return hidden, normed if dtype is None else normed.to(dtype)


def embed(
    ids: Tensor,
    tokens: Tensor,
    norm: Norm,
    *,
    positions: tuple[Tensor, Tensor] | None = None,
    types: Tensor | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """Sum the embedding vectors of each token, (V, D) tables, and normalize the sum: (N,) ids to (N, D).

    ``positions`` are a table and the row of each token; of the table ``types`` every token gets the first row. Under autocast a kernel
    writes the dtype of the product that reads it.
    """
    if ids.numel() and not isinstance(norm, nn.Identity) and _use_triton_norm(tokens, norm):
        from quiver.encoder.gpu import triton_norms

        autocast = torch.is_autocast_enabled(tokens.device.type)
        return triton_norms.embed(ids, tokens, positions, types, norm, dtype=product_dtype(tokens) if autocast else dtype)
    hidden = F.embedding(ids, tokens).to(dtype)
    if types is not None:
        hidden = hidden + types[0].to(dtype)
    if positions is not None:
        table, places = positions
        hidden = hidden + F.embedding(places, table).to(dtype)
    return normalize(hidden, norm)


# Tokens rotated at a time on a CPU: what the passes over them share stays in its cache.
ROTARY_CHUNK = 256


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Apply rotary positions to queries and keys, with gradients, in float32: at position 8,191 a bfloat16 angle is wrong by full turns.

    ``qkv``, (N, 3, H, K), is fresh from its product and may be rotated in place by cosines and sines (N, R/2). Returns queries, keys and
    values, (N, H, K) each, in the dtype of the input.
    """
    if use_triton(qkv):
        from quiver.encoder.gpu import triton_tokens

        return triton_tokens.rotate(qkv, cos, sin)
    if qkv.device.type == "cpu" and qkv.dtype in (torch.float32, torch.bfloat16) and not torch.compiler.is_compiling():
        turned: tuple[Tensor, Tensor, Tensor] = _RotatedHeads.apply(qkv, cos, sin)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return turned
    return rotate_reference(qkv, cos, sin)


def rotate_reference(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`rotate` by PyTorch operators, for any dtype and device; ``qkv`` is not changed."""
    qk, v = qkv[:, :2], qkv[:, 2]
    width = 2 * cos.shape[-1]
    first, second = qk[..., :width].float().chunk(2, dim=-1)  # (N, 2, H, R/2) each
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(qkv.dtype)
    q, k = (turned if width == qkv.shape[-1] else torch.cat((turned, qk[..., width:]), dim=-1)).unbind(1)
    return q, k, v


class _RotatedHeads(torch.autograd.Function):
    """`rotate` to heads whose tokens follow each other, which attention reads faster; its derivative is that by the negative angle."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        tokens, parts, heads, width = qkv.shape
        turned = qkv.new_empty(parts, heads, tokens, width).permute(2, 0, 1, 3)
        _rotate_heads(qkv[:, :2], cos, sin, turned[:, :2])
        turned[:, 2] = qkv[:, 2]
        return turned.unbind(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        gradient = join_qkv(grad_q, grad_k, grad_v)
        _rotate_heads(gradient[:, :2], cos, -sin, gradient[:, :2])
        return gradient, None, None


def _rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor, output: Tensor) -> None:
    """Write queries and keys, (N, 2, H, K), with rotary positions to ``output``, which may be the same tensor; computed in float32."""
    half = cos.shape[-1]
    columns = (torch.split(x, ROTARY_CHUNK) for x in (heads, output, cos[:, None, None], sin[:, None, None]))
    for part, place, c, s in zip(*columns, strict=True):
        first, second = part[..., :half].float(), part[..., half : 2 * half].float()
        turned = torch.addcmul(first * c, second, s, value=-1)
        place[..., half : 2 * half] = torch.addcmul(second * c, first, s)
        place[..., :half] = turned
        if 2 * half < part.shape[-1]:
            place[..., 2 * half :] = part[..., 2 * half :]


def rope_frequencies(theta: float, rotary_width: int, scaling: RopeScaling | None = None) -> tuple[Tensor, float]:
    """Return RoPE's angles per token in radians, (R/2,) float32, and the factor for cosines and sines (1 except for YaRN)."""
    exponents = torch.arange(0, rotary_width, 2, dtype=torch.float32) / rotary_width
    if scaling is None:
        return 1.0 / theta**exponents, 1.0
    factor = scaling.factor
    if scaling.kind == "linear":
        return 1.0 / theta**exponents / factor, 1.0
    if scaling.kind == "ntk":  # both the base and the lowest frequency are scaled by the factor, as GTE's models do
        return 1.0 / (theta * factor) ** exponents / factor ** (2 / rotary_width), 1.0
    return _scale_by_yarn(theta, exponents, scaling)


def _scale_by_yarn(theta: float, exponents: Tensor, scaling: RopeScaling) -> tuple[Tensor, float]:
    width = 2 * len(exponents)

    def dimension(turns: float) -> float:
        """Return the (real-valued) pair of dimensions that makes this many turns within the original positions."""
        return width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), width - 1)
    span = (high - low) or 0.001  # both at the same pair: a step
    stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    kept = 1.0 / theta**exponents
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return kept * (1 - stretched) + kept / scaling.factor * stretched, factor


class RotaryTable(nn.Module):
    """Cosines and sines of one theta for positions 0..P-1, kept in float32."""

    cos: Tensor  # (P, R/2)
    sin: Tensor  # (P, R/2)

    def __init__(self, *, theta: float, rotary_width: int, max_positions: int, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        frequencies, factor = rope_frequencies(theta, rotary_width, scaling)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        # Not persistent: checkpoints hold no tables, which follow from the configuration.
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryTable:
        """Follow the weights to their device but not to their dtype: the tables stay float32 in a half-precision model."""
        cos, sin = self.cos, self.sin
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.cos, self.sin = cos.to(self.cos.device), sin.to(self.sin.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions (N,), each (N, R/2) float32."""
        return self.cos[positions], self.sin[positions]


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slope of each head, (H,): a token at distance d loses slope * d from its score.

    For a power of two, slopes fall geometrically from 2 ** (-8 / H) to 2 ** -8. Other numbers of heads use the slopes of the next lower
    power of two and then every other slope of the next higher one.
    """
    whole = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / whole) for head in range(whole)]
    slopes += [2 ** (-8 * (head + 1) / (2 * whole)) for head in range(0, 2 * (heads - whole), 2)]
    return torch.tensor(slopes, dtype=torch.float32)


RotaryRows = tuple[Tensor, Tensor]
"""Cosines and sines of a batch's tokens, (N, R/2) each."""

Batch = PackedBatch | PaddedBatch
"""A packed batch, or a padded one when exporting to ONNX. Only attention distinguishes them."""


def make_norm(config: EncoderConfig) -> Norm:
    """Return the norm of the family, over D."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    """Token ids to hidden states: token vector, plus position and type vectors if the family has them, then a norm.

    Its tables and its norm are read, not called: forward hooks on them do not fire.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_offset = config.position_offset
        rows = config.max_positions + config.position_offset
        self.positions = nn.Embedding(rows, config.hidden_size) if config.positions == "absolute" else None
        self.token_types = nn.Embedding(config.type_vocab_size, config.hidden_size) if config.type_vocab_size else None
        self.norm: Norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        """(N,) ids to (N, D) hidden states of the given dtype, or as `quiver.encoder.layers.embed` writes them under autocast."""
        places = _offset_positions(batch, self.position_offset) if self.position_offset else batch.positions
        positions = None if self.positions is None else (self.positions.weight, places)
        types = None if self.token_types is None else self.token_types.weight  # a single text: every token has the first type
        hidden = embed(batch.ids, self.tokens.weight, self.norm, positions=positions, types=types, dtype=dtype)
        output: Tensor = self.dropout(hidden)
        return output


def _offset_positions(batch: Batch, offset: int) -> Tensor:
    """Rows of RoBERTa's position table, (N,). Texts start at row ``offset``, behind the row of the padding token, which has its id."""
    # As in fairseq and transformers, the token after a padding token has the position that it would have without it.
    is_text = batch.ids != offset - 1
    before = is_text.cumsum(0) - is_text.long()  # tokens of the batch before each one, without padding tokens
    # Not len(before), which would be a constant of an exported graph.
    starts = torch.arange(before.shape[0], device=before.device) - batch.positions  # where each token's sequence starts
    return torch.where(is_text, before - before.gather(0, starts) + offset, offset - 1)


class SelfAttention(nn.Module):
    """Multi-head self-attention on packed tokens; one matrix gives queries, keys and values.

    The block applies ``dropout`` where it adds the output to the residual stream.
    """

    slopes: Tensor | None

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.window = config.layer_window(layer)
        self.qkv = Linear(config.hidden_size, 3 * config.hidden_size, bias=config.qkv_bias, parts=3)
        self.out = Linear(config.hidden_size, config.hidden_size, bias=config.attention_output_bias)
        self.probability_dropout = config.attention_dropout
        self.dropout = nn.Dropout(config.attention_output_dropout)
        slopes = alibi_slopes(config.num_heads) if config.positions == "alibi" else None
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, hidden: Tensor, batch: Batch, rope: RotaryRows | None) -> Tensor:
        """(N, D) to (N, D)."""
        qkv = self.qkv(hidden).view(hidden.shape[0], 3, self.heads, -1)  # (N, 3, H, K)
        q, k, v = qkv.unbind(1) if rope is None else rotate(qkv, *rope)
        dropout = self.probability_dropout if self.training else 0.0
        mixed = attend(q, k, v, batch, self.window, slopes=self.slopes, dropout=dropout)
        output: Tensor = self.out(mixed.flatten(1))
        return output


class MLP(nn.Module):
    """Two matrices and an activation; in a gated MLP the first matrix gives the activated half and its gate.

    The block applies ``output_dropout`` where it adds the output to the residual stream.
    """

    def __init__(self, config: EncoderConfig, layer: int = 0) -> None:
        super().__init__()
        self.width, self.gated = config.intermediate_size, config.layer_mlp(layer) == "gated"
        self.activation = config.activation
        self.up = Linear(config.hidden_size, config.intermediate_size * (2 if self.gated else 1), bias=config.mlp_input_bias)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_output_bias)
        self.inner_dropout = nn.Dropout(config.mlp_inner_dropout)
        self.output_dropout = nn.Dropout(config.mlp_output_dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, D) to (N, D)."""
        inner = self.up(hidden)  # (N, I) or, gated, (N, 2 I)
        inner = gated(inner, self.activation) if self.gated else ACTIVATION_FUNCTIONS[self.activation](inner)
        output: Tensor = self.down(self.inner_dropout(inner))
        return output


class Block(nn.Module):
    """Attention and MLP around a residual stream, with a norm before each, after each, or one before both in parallel.

    A block does not add its last update to the stream: the norm that follows does, so that dropout, sum and norm take one pass over memory.
    The dropouts of its updates are read, not called: forward hooks on them do not fire.
    """

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.norm_position = config.layer_norm_position(layer)
        # Blocks of another kind do not add the update that this one leaves.
        self.adds_update = layer + 1 < config.num_layers and config.layer_norm_position(layer + 1) != self.norm_position
        has_norm = layer > 0 or config.first_attention_norm
        self.attention_norm: Norm = make_norm(config) if has_norm else nn.Identity()
        self.attention = SelfAttention(config, layer)
        if self.norm_position != "parallel":
            self.mlp_norm = make_norm(config)
        self.mlp = MLP(config, layer)

    def forward(self, hidden: Tensor, update: Tensor | None, batch: Batch, rope: RotaryRows | None) -> tuple[Tensor, Tensor | None]:
        """Run one block on the residual stream, (N, D), and what the previous block leaves to add to it, (N, D) or None.

        Returns the stream, and the update to add to it, with `update_dropout`; None after a post-norm block and before one of another kind.
        """
        hidden, update = self._update(hidden, update, batch, rope)
        if update is None or not self.adds_update:
            return hidden, update
        return hidden + F.dropout(update, self.update_dropout), None

    def _update(self, hidden: Tensor, update: Tensor | None, batch: Batch, rope: RotaryRows | None) -> tuple[Tensor, Tensor | None]:
        if self.norm_position == "post":
            return self.feed_forward(hidden, self.attention(hidden, batch, rope))
        hidden, normed = add_norm(hidden, update, self.attention_norm, dropout=self.update_dropout)
        mixed = self.attention(normed, batch, rope)
        if self.norm_position == "parallel":
            return hidden, self.attention.dropout(mixed) + self.mlp.output_dropout(self.mlp(normed))
        return self.feed_forward(hidden, mixed)

    def feed_forward(self, hidden: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run what follows attention, token by token, unless norms are parallel; `quiver.encoder.model.compile_encoder` replaces it."""
        dropout = self.attention.dropout.p if self.training else 0.0
        if self.norm_position == "post":
            _, hidden = add_norm(hidden, mixed, self.attention_norm, dropout=dropout)
            return add_norm(hidden, self.mlp(hidden), self.mlp_norm, dropout=self._output_dropout)[1], None
        hidden, normed = add_norm(hidden, mixed, self.mlp_norm, dropout=dropout)
        return hidden, self.mlp(normed)

    @property
    def update_dropout(self) -> float:
        """Probability of dropping a number of the update that a block leaves; that of the block before, which is of the same kind."""
        return self._output_dropout if self.norm_position == "pre" else 0.0

    @property
    def _output_dropout(self) -> float:
        return self.mlp.output_dropout.p if self.training else 0.0


def any_hooked(modules: Iterable[nn.Module]) -> bool:
    """Return whether a forward hook is registered on one of the modules, or globally."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)
