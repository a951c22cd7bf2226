"""Indexes: documents that are searched by vectors, in memory or in a folder whose changes are atomic."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
