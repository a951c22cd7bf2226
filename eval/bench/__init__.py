"""Benchmarks with three subjects: encoder, training and index."""
