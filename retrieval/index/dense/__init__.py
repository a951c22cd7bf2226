"""Compressed engines for one vector a document: product codes find candidates, and bytes that stay on the disk give their scores."""
