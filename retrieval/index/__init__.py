"""Indexes: documents that are searched by vectors, in memory or in a folder whose changes are atomic."""

from quiver.encoder.environment import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
