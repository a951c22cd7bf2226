"""Compressed index of token vectors: candidates from inverted lists, final scores from 2 to 4 bits a coordinate."""
