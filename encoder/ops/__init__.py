"""The token-wise arithmetic between the matrix products: rotary positions, gates, norms."""

from encoder.ops.activations import ACTIVATION_FUNCTIONS
from encoder.ops.gated import gated
from encoder.ops.heads import thirds
from encoder.ops.norms import add_norm, normalize
from encoder.ops.rotary import rotate, rotate_

__all__ = ["ACTIVATION_FUNCTIONS", "add_norm", "gated", "normalize", "rotate", "rotate_", "thirds"]
