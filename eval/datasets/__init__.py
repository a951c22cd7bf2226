"""Published collections: what there is, where it comes from, how its files are laid out, and the cache that holds them.

This package knows nothing of models, runs or scores; ``quiver.eval.benchmark`` makes benchmarks of its entries.
The order of a collection's rows is that of its files, which is another in an archive than on the hub; neither a ranking nor the checksum of
the data (``quiver.eval.results``) depends on it.
"""
