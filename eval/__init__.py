"""Rankings to numbers to reports: collections, measures, baselines, results."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
