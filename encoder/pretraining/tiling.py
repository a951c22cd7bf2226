"""Initialize a larger encoder from a smaller one: every tensor is tiled with the smaller one's values.

Along an axis of length n that becomes N, index r takes the old index (r - (N - n) // 2) mod n: the original is in the middle and goes on
periodically (``wraparound``, which the paper found best). The two other ways that it tried: the original in the middle of random values
(``random-edges``), and the old index r mod n (``from-edge``). Layer i of L takes the old layer round(i l / L). Tensors of several equal
parts are tiled part by part: queries, keys and values; the halves of a gated MLP; heads, and inside a head the two halves that RoPE rotates
against each other.

With tiling as published, a matrix adds up an input as often as it is repeated, and a model that is made wider starts no better than random.
Therefore each column of a matrix is divided by the number of copies of its input.

Shapes: D model width, H heads, K head width, I MLP width, V vocabulary, L layers; small letters for the parent's.
Source: ModernBERT, arXiv:2412.13663, appendix A.2, and ``tile_weights_from_middle``, ``center_weights`` and ``tile_weights_from_edge`` in
AnswerDotAI/ModernBERT at 8c57a0f; Gopher, arXiv:2112.11446 (map of layers); Net2Net, arXiv:1511.05641, section 2.2 (copies that share).
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from quiver.encoder.config import DROPOUTS, EncoderConfig, InitMethod, Tiling
from quiver.encoder.errors import InputError
from quiver.encoder.heads import MaskedLM, init_head
from quiver.encoder.model import Encoder, init_weights

DRAWN: InitMethod = "full_megatron"
# Settings that may differ between the two models: sizes, and settings on which no weight depends.
FREE = frozenset(
    {
        *("hidden_size", "num_heads", "intermediate_size", "layer_types", "first_attention_norm", "family"),
        *("max_positions", "window", "global_theta", "local_theta", "global_scaling", "local_scaling"),
        *("norm_eps", "initializer_range", "pad_token_id", "cls_token_id", "sep_token_id", *DROPOUTS),
    }
)


def layer_map(old: int, new: int, initial: int = 0) -> list[int]:
    """For each layer of the larger model the one of the smaller: round(i l / L), ties to even, at most l - 1; ``initial`` ones stay."""
    old, later = old - initial, new - initial
    return [*range(initial), *(initial + min(round(layer * old / later), old - 1) for layer in range(later))]


def tile(tensor: Tensor, shape: tuple[int, ...], tiling: Tiling = "wraparound", edges: Tensor | None = None) -> Tensor:
    """A tensor in another shape of as many axes; of an axis that shrinks, the middle remains, or with ``from-edge`` the beginning.

    ``edges`` has the values, in the new shape, of ``random-edges``.

    Example:
        >>> tile(torch.tensor([1, 2, 3]), (6,)).tolist(), tile(torch.tensor([1, 2, 3, 4]), (2,)).tolist()
        ([3, 1, 2, 3, 1, 2], [2, 3])
        >>> tile(torch.tensor([1, 2, 3]), (6,), "from-edge").tolist()
        [1, 2, 3, 1, 2, 3]
        >>> tile(torch.tensor([1, 2, 3]), (6,), "random-edges", torch.full((6,), 9)).tolist()
        [9, 1, 2, 3, 9, 9]
    """
    if tensor.ndim != len(shape) or not tensor.numel():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} cannot be tiled to {shape}")
    is_edge = torch.zeros((), dtype=torch.bool, device=tensor.device)
    for axis, (old, new) in enumerate(zip(tensor.shape, shape, strict=True)):
        if old != new:
            origins = _find_origins(old, new, tiling).to(tensor.device)
            tensor = tensor.index_select(axis, origins.clamp(min=0))
            is_edge = is_edge | (origins < 0).reshape(-1, *[1] * (len(shape) - 1 - axis))
    return tensor if edges is None else torch.where(is_edge, edges.to(tensor), tensor)


def _find_origins(old: int, new: int, tiling: Tiling) -> Tensor:
    """The old index of each new one, (new,); -1 for a random value."""
    if tiling == "from-edge":
        return torch.arange(new) % old
    before = (new - old) // 2 if new > old else -((old - new) // 2)  # so that growing and shrinking again gives the original
    places = torch.arange(new) - before
    return places % old if tiling == "wraparound" else places.where((places >= 0) & (places < old), torch.tensor(-1))


def enlarge(
    encoder: Encoder,
    config: EncoderConfig,
    *,
    shared: bool = True,
    tiling: Tiling = "wraparound",
    seed: int = 0,
    method: InitMethod = DRAWN,
) -> Encoder:
    """A new encoder of another size that begins with what a trained one has learnt.

    It has the parent's dtype, device and mode; a norm that only the larger one has keeps its initial values. Widths, layers and heads may
    be any, also smaller ones. ``shared`` divides by the number of copies, see above; False for the published map of unchanged values. The
    ``seed`` and the ``method`` (`quiver.encoder.config.INIT_METHODS`) are those of the values of ``random-edges``.

    Raises:
        InputError: The two differ in more than sizes, or the parent's weights are packed for inference; names the field.

    Example:
        >>> from quiver.encoder import Encoder, EncoderConfig, enlarge
        >>> small = EncoderConfig.modernbert(
        ...     vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"])
        >>> large = EncoderConfig.modernbert(
        ...     vocab_size=64, hidden_size=48, num_heads=3, intermediate_size=80, layer_types=["global", "local", "local"])
        >>> enlarge(Encoder(small), large).config.hidden_size
        48
    """
    _check(encoder, config)
    larger = Encoder(config)
    if tiling == "random-edges":
        init_weights(larger, seed=seed, method=method)
    larger.load_state_dict(larger.state_dict() | _tiled(encoder, larger, tiling, shared=shared))
    return larger.to(device=encoder.device, dtype=encoder.embeddings.tokens.weight.dtype).train(encoder.training)


def enlarge_masked_lm(
    model: MaskedLM, config: EncoderConfig, *, shared: bool = True, tiling: Tiling = "wraparound", seed: int = 0, method: InitMethod = DRAWN
) -> MaskedLM:
    """`enlarge` for a masked language model, with its errors: the head is tiled too."""
    encoder = enlarge(model.encoder, config, shared=shared, tiling=tiling, seed=seed, method=method)
    own = model.decoder
    larger = MaskedLM(encoder, transform=model.transform.config, decoder_bias=own.bias is not None, tied=own.weight is None)
    if tiling == "random-edges":
        init_head(larger, seed=seed + 1, method=method)
    state, old = larger.state_dict(), model.state_dict()
    for name, tensor in state.items():
        if not name.startswith("encoder."):
            # (D, D), (D,), (V, D) or (V,): no axis consists of parts.
            state[name] = tile(old[name], tuple(tensor.shape), tiling, tensor)
            if shared and tensor.ndim > 1:
                state[name] = state[name] / _count_copies(old[name].shape[-1], tensor.shape[-1], tiling).to(state[name])
    larger.load_state_dict(state)
    if shared and own.weight is None:  # the decoder is the embedding, which is not divided; its input is divided instead
        with torch.no_grad():
            for weight in larger.transform.norm.parameters():
                weight.div_(_count_copies(model.encoder.config.hidden_size, config.hidden_size, tiling))
    return larger.to(device=encoder.device, dtype=encoder.embeddings.tokens.weight.dtype).train(model.training)


def _check(encoder: Encoder, config: EncoderConfig) -> None:
    if encoder.prepacked:
        raise InputError("the encoder is prepacked for inference; load the checkpoint with load_encoder and enlarge that")
    fixed = {field.name for field in fields(EncoderConfig)} - FREE
    if config.positions == "absolute":
        fixed |= {"max_positions"}
    old = encoder.config
    if old.initial_layers == old.num_layers:
        fixed |= {"layer_types"}  # all layers are initial ones: more of them would need others
    differing = [name for name in sorted(fixed) if getattr(old, name) != getattr(config, name)]
    if differing:
        differences = "; ".join(f"{name} is {getattr(old, name)!r} and would be {getattr(config, name)!r}" for name in differing)
        raise InputError(f"enlarging an encoder may change only its sizes, but {differences}")


def _count_copies(old: int, new: int, tiling: Tiling) -> Tensor:
    """For each index along a tiled axis, the number of indices with the same old index, (new,); 1 for random values."""
    origins = _find_origins(old, new, tiling)
    return torch.bincount(origins.clamp(min=0), weights=(origins >= 0).double(), minlength=old)[origins].where(origins >= 0, 1)


def _tiled(encoder: Encoder, larger: Encoder, tiling: Tiling, *, shared: bool) -> dict[str, Tensor]:
    """Tensors of the larger encoder by name, without those that the smaller one lacks."""
    old = encoder.state_dict()
    layers = layer_map(encoder.config.num_layers, larger.config.num_layers, larger.config.initial_layers)
    tiled = {}
    for name, tensor in larger.state_dict().items():
        source, kind = name, name
        if name.startswith("layers."):
            _, layer, kind = name.split(".", 2)
            source = f"layers.{layers[int(layer)]}.{kind}"
        if source not in old:  # only the norm before the first attention may be missing
            continue
        parts, shape = old[source].reshape(_split_axes(kind, encoder.config, old[source])), _split_axes(kind, larger.config, tensor)
        found = tile(parts, shape, tiling, tensor.reshape(shape))
        if shared and tensor.ndim > 1 and not name.startswith("embeddings."):
            # Input axes: heads and their parts, or the last axis.
            for axis in range(1 if kind == "attention.out.weight" else len(shape) - 1, len(shape)):
                count = _count_copies(parts.shape[axis], shape[axis], tiling)
                found = found / count.reshape(-1, *[1] * (len(shape) - 1 - axis)).to(found)
        tiled[name] = found.reshape(tensor.shape)
    return tiled


def _heads(config: EncoderConfig) -> tuple[int, int, int]:
    """H heads of two halves of K / 2 if RoPE rotates whole heads, otherwise of one part of K."""
    halves = 2 if config.positions == "rope" and config.rotary_width == config.head_width else 1
    return config.num_heads, halves, config.head_width // halves


def _split_axes(kind: str, config: EncoderConfig, tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor with a separate axis for its parts."""
    if kind.startswith("attention.qkv."):
        return (3, *_heads(config), *tensor.shape[1:])
    if kind == "attention.out.weight":
        return (len(tensor), *_heads(config))
    if kind.startswith("mlp.up."):
        return (len(tensor) // config.intermediate_size, config.intermediate_size, *tensor.shape[1:])
    return tuple(tensor.shape)
