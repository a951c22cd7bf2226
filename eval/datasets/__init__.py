"""Published collections: their names, sources and file layouts, and the cache of downloaded ones.

``quiver.eval.datasets.benchmarks`` makes benchmarks of the entries in this package.
A collection's rows keep the order of its files, which differs between an archive and the Hugging Face Hub. Neither rankings nor the
checksum of the data (``quiver.eval.results``) depend on the order.
"""
