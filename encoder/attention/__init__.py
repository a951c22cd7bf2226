"""Attention over packed batches: one contract, several ways to compute it."""

from quiver.encoder.attention.dispatch import BACKENDS, AttentionCall, attend, choose_backend

__all__ = ["BACKENDS", "AttentionCall", "attend", "choose_backend"]
