"""Attention over packed batches: one contract, several ways to compute it."""

from quiver.encoder.attention.dispatch import BACKENDS, AttentionCall, attend, best_dtype, choose_backend

__all__ = ["BACKENDS", "AttentionCall", "attend", "best_dtype", "choose_backend"]
