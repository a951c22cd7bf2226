"""Text in, hidden states out: the native encoder. It knows nothing of retrieval."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
