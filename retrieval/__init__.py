"""Hidden states to vectors, to an index, to a ranking: models, corpora, indexes, search and training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
