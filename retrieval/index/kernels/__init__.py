"""Inner loops of search and encoding, compiled by numba. Importing numba takes half a second, so it is imported on first use.

Where compiled code cannot be cached on disk, numba compiles it again in every process (`quiver.encoder.cpu.support.can_cache` logs a
warning that names the remedy).
"""

from quiver.encoder.environment import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
