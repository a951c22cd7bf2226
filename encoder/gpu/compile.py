"""torch.compile for an encoder whose batches differ in length.

Only the parts that see (N, D) are compiled: the MLPs, half of the work and most of what can be fused. N is dynamic from the first
compilation, and layers of one shape share it. Attention is not compiled: it groups a batch's sequences by length, so a compiled version
would be recompiled for every new set of lengths.

Shapes: N packed tokens, D width.
"""

from __future__ import annotations

import types
from typing import cast

import torch

from quiver.encoder.layers import MLP, Block
from quiver.encoder.model import Encoder


def compile_encoder(encoder: Encoder) -> Encoder:
    """Compile an encoder's token-wise parts, in place; its weights, their names and its results stay the same.

    The first batch is compiled, and again the first batch of a single token, the first in training instead of inference and the first under
    another autocast setting; batches of other lengths are not. Requires a C++ compiler on a CPU and Triton on a GPU. It pays off in
    training; in inference on a CPU, Quiver's own kernels are faster.

    Args:
        encoder: Changed in place.

    Returns:
        ``encoder``.
    """
    compiled = torch.compile(MLP.forward, dynamic=True, fullgraph=True)
    for layer in encoder.layers:
        # As a bound method it follows the module into copies (weight averaging); a closure would not.
        mlp = cast("Block", layer).mlp
        mlp.forward = types.MethodType(compiled, mlp)  # type: ignore[method-assign]
    return encoder
