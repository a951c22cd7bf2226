"""Hidden states to vectors, to an index, to a ranking: models, corpora, indexes, search and training."""

from quiver.encoder.environment import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
