"""Compressed index of token vectors: candidates from inverted lists, final scores from 2, 3 or 4 bits a coordinate."""
