"""Compressed token engine: candidates from inverted lists, final scores from codes of 2 to 4 bits per coordinate."""
