"""Evaluation of retrievers: collections, measures, baselines, results and reports."""

from quiver.encoder.environment import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
