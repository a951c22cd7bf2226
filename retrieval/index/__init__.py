"""Indexes: documents that can be searched by vectors, in memory or as a folder whose every change is whole or not there."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
