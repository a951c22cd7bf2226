"""The token-wise arithmetic between the matrix products: rotary positions, gates, norms."""

from quiver.encoder.ops.activations import ACTIVATION_FUNCTIONS
from quiver.encoder.ops.gated import gated
from quiver.encoder.ops.heads import thirds
from quiver.encoder.ops.norms import add_norm, normalize
from quiver.encoder.ops.rotary import rotate, rotate_

__all__ = ["ACTIVATION_FUNCTIONS", "add_norm", "gated", "normalize", "rotate", "rotate_", "thirds"]
