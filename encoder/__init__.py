"""Text in, hidden states out: the native encoder. It knows nothing of retrieval."""

from quiver.encoder.environment import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
