"""Compressed engines for dense vectors: product codes in memory find candidates, and codes on disk give their scores."""
