"""Published collections: what there is, where it comes from, how its files are laid out, and the cache that holds them.

This package knows nothing of models, runs or scores; ``eval.benchmark`` makes benchmarks of its entries.
"""
