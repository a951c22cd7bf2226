"""The encoder: a packed batch in, one hidden state per token out. Tokens are never padded on the way.

Shapes: B sequences, N packed tokens, D model width.
Source: ModernBERT, arXiv:2412.13663, section 2.1.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from quiver.encoder.config import EncoderConfig, InitMethod, Precision
from quiver.encoder.cpu import hidden_dtype, run_blocks
from quiver.encoder.errors import InputError
from quiver.encoder.layers import MLP, Block, Embeddings, Norm, RotaryRows, RotaryTable, add_norm, make_norm
from quiver.encoder.packing import PackedBatch, PaddedBatch, neighbours_of_equal_length

if TYPE_CHECKING:
    from typing_extensions import Self

    from quiver.encoder.gpu.graphs import EncoderGraphs

GRAPHS_VARIABLE = "QUIVER_CUDA_GRAPHS"
"""Environment variable: with 0, small batches on a GPU are not encoded by captured CUDA graphs."""


class Encoder(nn.Module):
    """A bidirectional transformer over packed batches; its weights are torch's defaults until they are loaded or initialised.

    Example:
        >>> from quiver.encoder import Encoder, EncoderConfig
        >>> from quiver.encoder.packing import pack_ids
        >>> config = EncoderConfig.modernbert(
        ...     vocab_size=64, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"])
        >>> Encoder(config)(pack_ids([[1, 2, 3], [4, 5]])).shape
        torch.Size([5, 32])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm: Norm = make_norm(config) if config.final_norm else nn.Identity()
        # Layers with equal theta and scaling share a table; `_table_of` holds the index of each layer's table.
        kinds = [kind if config.layer_rotates(layer) else None for layer, kind in enumerate(config.layer_types)]
        ropes = [None if kind is None else (config.theta(kind), config.scaling(kind)) for kind in kinds]
        tables = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self._table_of = [None if rope is None else tables.index(rope) for rope in ropes]
        self.rotary = nn.ModuleList(
            RotaryTable(theta=theta, rotary_width=config.rotary_width, max_positions=config.max_positions, scaling=scaling)
            for theta, scaling in tables
        )
        self.prepacked: Precision | None = None
        """Precision of `quiver.encoder.optimize_for_inference`; a prepacked encoder has no gradients. None for a plain encoder."""
        self._graphs: EncoderGraphs | None = None
        self.gradient_checkpointing = False
        """In training, keep one hidden state per block and recompute the rest in the backward pass."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embeddings.tokens.weight.device

    @property
    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.layers))

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.state_dict().values())

    def train(self, mode: bool = True) -> Self:
        """Switch to training or evaluation mode; a prepacked encoder cannot be trained."""
        if mode and self.prepacked:
            raise ValueError("a prepacked encoder has no gradients; to train, load the checkpoint with load_encoder")
        return super().train(mode)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Encode a batch of N tokens: hidden states after the final norm, (N, D), in the order of ``batch.ids``.

        The batch is moved to the device of the weights if necessary. A sequence that is longer than the positions is an InputError.
        """
        if batch.max_seqlen > self.config.max_positions:
            raise InputError(
                f"a sequence has {batch.max_seqlen} tokens, more than the encoder's {self.config.max_positions} positions; truncate it"
            )
        graphs = self._usable_graphs()
        states = None if graphs is None else graphs.encode(self, batch)
        if states is not None:
            return states
        with inference_only(self.prepacked is not None):
            batch, order = self._arrange(batch.to(self.device))
            output = self.run(batch)
            return output if order is None else output[order]

    def run(self, batch: PackedBatch) -> Tensor:
        """Run embeddings, blocks and the final norm on a batch as it is, (N, D); the part of ``forward`` that a CUDA graph captures."""
        ropes = self._rotary_rows(batch.positions)
        dtype = torch.float32 if self.prepacked == "int8" else self.embeddings.tokens.weight.dtype
        if self.device.type == "cpu":
            dtype = hidden_dtype(self._blocks, batch, dtype, self.config.hidden_size, ropes[-1])
        hidden, update = self.embeddings(batch, dtype), None
        states = run_blocks(self._blocks, batch, hidden, ropes)
        if states is not None:
            hidden = states
        else:
            checkpoints = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
            for layer, rope in zip(self._blocks, ropes, strict=True):
                inputs = hidden, update, batch, rope
                hidden, update = checkpoint(layer, *inputs, use_reentrant=False) if checkpoints else layer(*inputs)
        dropout, dtype = self._blocks[-1].update_dropout, self.embeddings.tokens.weight.dtype
        return add_norm(hidden, update, self.final_norm, dropout=dropout, dtype=dtype)[1]

    def _usable_graphs(self) -> EncoderGraphs | None:
        """Return the captured CUDA graphs, on a GPU in inference without autocast, unless the environment variable turns them off."""
        if self.device.type != "cuda" or self.training or torch.is_grad_enabled() or os.environ.get(GRAPHS_VARIABLE) == "0":
            return None
        if torch.is_autocast_enabled("cuda") or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None
        if self._graphs is None:
            from quiver.encoder.gpu.graphs import EncoderGraphs

            self._graphs = EncoderGraphs()
        return self._graphs

    def forget_graphs(self) -> None:
        """Forget captured CUDA graphs, which read the weights that the encoder had: after a weight or module is replaced."""
        self._graphs = None

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        self.forget_graphs()  # the weights move
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]  # torch leaves it untyped

    def _arrange(self, batch: PackedBatch) -> tuple[PackedBatch, Tensor | None]:
        """Put sequences of equal length side by side on a CPU, once per batch; returns the place of each token, None if unchanged."""
        if self.device.type != "cpu" or torch.compiler.is_compiling():
            return batch, None
        if self.prepacked == "int8" and not batch.batch_invariant:
            # Kernels answer even a lone query sooner than PyTorch operators, which take some forty calls per quantised block.
            batch = replace(batch, batch_invariant=True, memo={})
        if "arranged" not in batch.memo:
            batch.memo["arranged"] = neighbours_of_equal_length(batch)
        arranged: tuple[PackedBatch, Tensor | None] = batch.memo["arranged"]
        return arranged

    def forward_padded(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Encode a padded batch, (B, S) ids and mask, by operators that do not depend on sizes, for exported graphs.

        It runs the layers of ``forward`` and computes padding too. The mask is 0 for padding and for tokens that only attend to others.
        Returns (B, S, D); rows of padding are undefined.
        """
        batch = PaddedBatch.of(ids, mask)
        hidden: Tensor = self.embeddings(batch, self.embeddings.tokens.weight.dtype)
        update: Tensor | None = None
        for layer, rope in zip(self.layers, self._rotary_rows(batch.positions), strict=True):
            hidden, update = layer(hidden, update, batch, rope)
        return add_norm(hidden, update, self.final_norm)[1].reshape(*ids.shape, -1)

    def _rotary_rows(self, positions: Tensor) -> Sequence[RotaryRows | None]:
        """Return each layer's rows of its rotary table for positions (N,); None for a layer without RoPE."""
        rows = [table(positions) for table in self.rotary]
        return [None if table is None else rows[table] for table in self._table_of]


@contextmanager
def inference_only(enabled: bool) -> Iterator[None]:
    """Switch gradients and CPU autocast off: prepacked matrices have no gradients and one dtype."""
    if not enabled or not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")):
        yield
        return
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


_DRAWS = (Tensor.normal_, Tensor.uniform_)


class Uninitialized(TorchFunctionMode):
    """Modules made in this context have arbitrary weights, for code that sets each of them: drawing 150 million takes a second.

    The random state does not advance. Making them on the meta device instead imports torch's compiler, which takes longer.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Leave out what initialises a tensor in place."""
        if func in _DRAWS or getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


# Truncation in standard deviations; ModernBERT's init_cutoff_factor, and Mitchell's.
INIT_CUTOFF, MITCHELL_CUTOFF = 2.0, 3.0


def init_weights(encoder: Encoder, *, seed: int, method: InitMethod = "full_megatron") -> Encoder:
    """Initialise all weights, in place: matrices and embeddings as ``method`` says, biases by 0, weights of norms by 1.

    The configuration gives the standard deviation and the number of layers. Equal seeds give equal weights.

    Source: ModernBERT, arXiv:2412.13663, appendix A.1 (Megatron initialisation).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, module in encoder.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            writes = name.endswith(("attention.out", "mlp.down"))
            draw_matrix(module.weight, method, encoder.config, generator, layer=int(name.split(".")[1]) if writes else None)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)
    return encoder


def draw_matrix(weight: Tensor, method: InitMethod, config: EncoderConfig, generator: torch.Generator, *, layer: int | None = None) -> None:
    """Draw a matrix, (out, in), in place; ``layer`` is that of an output matrix."""
    std, fan_in, cutoff = config.initializer_range, weight.shape[1], INIT_CUTOFF
    if method == "full_megatron":
        std /= 1.0 if layer is None else math.sqrt(2 * config.num_layers)
    elif method == "mitchell":
        std, cutoff = 1 / math.sqrt(fan_in * (1 if layer is None else 2 * (layer + 1))), MITCHELL_CUTOFF
    elif method != "normal":
        std = math.sqrt((2 if method == "kaiming_normal" else 1) / fan_in)
    if method in ("full_megatron", "mitchell"):
        nn.init.trunc_normal_(weight, std=std, a=-cutoff * std, b=cutoff * std, generator=generator)
    else:
        nn.init.normal_(weight, std=std, generator=generator)


def compile_encoder(encoder: Encoder, *, backend: str = "inductor") -> Encoder:
    """Compile what is done token by token between two attention layers, in place: residual sums, norms and MLP by torch.compile.

    The weights, their names and the results stay the same. Attention and the product before it are not compiled: attention depends on the
    layout of a batch, so a compiled version would be recompiled for every new set of lengths. In blocks with parallel norms only the MLP is
    compiled. The first batch is compiled, and again the first in training and the first under another autocast setting. Requires a C++
    compiler on a CPU and Triton on a GPU; it pays off in training.
    """
    options: dict[str, Any] = {"dynamic": True, "fullgraph": True, "backend": backend}
    compiled_block, compiled_mlp = torch.compile(Block.feed_forward, **options), torch.compile(MLP.forward, **options)
    for layer in cast("list[Block]", list(encoder.layers)):
        # As bound methods they follow the module into copies (weight averaging); closures would not.
        if layer.norm_position == "parallel":
            layer.mlp.forward = types.MethodType(compiled_mlp, layer.mlp)  # type: ignore[method-assign]
        else:
            layer.feed_forward = types.MethodType(compiled_block, layer)  # type: ignore[method-assign]
    return encoder
