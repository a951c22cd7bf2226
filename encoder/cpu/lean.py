"""Blocks without gradients on a CPU: everything token-wise is done a few tokens at a time, in place.

Besides the residual stream a pass holds queries, keys, values and what attention makes of them; norms, gates and the MLP's
inner states never leave the cache, and no layer asks the system for fresh pages. The result is that of `Block.forward`.

Shapes: N packed tokens, D model width, H heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from quiver.encoder.attention import attend, best_dtype
from quiver.encoder.cpu.linear import Product
from quiver.encoder.layers import Block, RotaryRows
from quiver.encoder.ops import normalize, rotate_
from quiver.encoder.packing import PackedBatch

# Tokens of one step: the inner states of ModernBERT-base's MLP, 9 MB, fit a processor's last cache, and products are still large.
CHUNK = 1024


def heads_buffer(block: Block, hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Room for the queries, keys and values of one layer after the other, (3, N, H, K).

    Args:
        block: Any of them.
        hidden: The residual stream, (N, D).
        batch: The packed batch.
    """
    shaped = hidden.view(len(hidden), block.attention.heads, -1)
    return hidden.new_empty(3, *shaped.shape, dtype=best_dtype(shaped, batch, block.attention.slopes))


def advance_(block: Block, hidden: Tensor, batch: PackedBatch, rope: RotaryRows | None, buffer: Tensor) -> None:
    """Run one block over the residual stream, in place.

    Args:
        block: In evaluation mode.
        hidden: The residual stream, (N, D); overwritten.
        batch: The packed batch.
        rope: Its rows of this layer's rotary table.
        buffer: What `heads_buffer` gave; overwritten.
    """
    attention = block.attention
    products = attention.qkv.products(hidden)
    for part in _chunks(len(hidden)):
        normed = hidden[part] if block.norm_position == "post" else normalize(hidden[part], block.attention_norm)
        for product, heads in zip(products, buffer, strict=True):
            heads[part] = product(normed).view(len(normed), *heads.shape[1:])
    q, k, v = buffer
    if rope is not None:
        for turned in (q, k):
            rotate_(turned, *rope, batch_invariant=batch.batch_invariant)
    mixed = attend(q, k, v, batch, attention.window, slopes=attention.slopes).flatten(1)  # (N, D)
    (out,) = attention.out.products(hidden)
    mlp = _mlp(block, hidden)
    for part in _chunks(len(hidden)):
        STEPS[block.norm_position](block, hidden[part], out(mixed[part].to(hidden.dtype)), mlp)


def _chunks(tokens: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, tokens, CHUNK))


def _mlp(block: Block, hidden: Tensor) -> Product:
    (up,), (down,) = block.mlp.up.products(hidden), block.mlp.down.products(hidden)
    return lambda x: down(block.mlp.activate(up(x)))


def _pre(block: Block, hidden: Tensor, update: Tensor, mlp: Product) -> None:
    hidden.add_(update)
    hidden.add_(mlp(normalize(hidden, block.mlp_norm)))


def _post(block: Block, hidden: Tensor, update: Tensor, mlp: Product) -> None:
    hidden.copy_(normalize(hidden.add_(update), block.attention_norm))
    hidden.copy_(normalize(hidden.add_(mlp(hidden)), block.mlp_norm))


def _parallel(block: Block, hidden: Tensor, update: Tensor, mlp: Product) -> None:
    hidden.add_(update.add_(mlp(normalize(hidden, block.attention_norm))))


STEPS: dict[str, Callable[[Block, Tensor, Tensor, Product], None]] = {"pre": _pre, "post": _post, "parallel": _parallel}
"""For each norm position: attention's update and the MLP, applied to some tokens of the residual stream in place."""
