"""torch.compile for an encoder whose batches never have the same length twice.

What is compiled are the parts that see nothing but (N, D): the MLPs, half of the work and most of what can be fused. N is
dynamic from the first compilation, and layers of one shape share it. Attention stays outside: how it groups a batch's
sequences depends on their lengths, and a compiled version of it would be compiled again for every new set of them.

Shapes: N packed tokens, D width.
"""

from __future__ import annotations

import types
from typing import cast

import torch

from quiver.encoder.layers import MLP, Block
from quiver.encoder.model import Encoder


def compile_encoder(encoder: Encoder) -> Encoder:
    """Compile an encoder's token-wise parts; its weights, their names and its results stay the same.

    The first batch compiles once, the first batch of a single token, of training instead of inference and under another
    autocast setting once more; a batch of another length never does. It needs a C++ compiler on a CPU and Triton on a
    GPU. It pays in training; without gradients on a CPU the encoder as it is reuses memory and packs weights, which
    compiled code does not.

    Args:
        encoder: Changed in place.

    Returns:
        ``encoder``.
    """
    compiled = torch.compile(MLP.forward, dynamic=True, fullgraph=True)
    for layer in encoder.layers:
        # As a bound method it follows the module into copies (weight averaging), which a closure would not.
        mlp = cast("Block", layer).mlp
        mlp.forward = types.MethodType(compiled, mlp)  # type: ignore[method-assign]
    return encoder
