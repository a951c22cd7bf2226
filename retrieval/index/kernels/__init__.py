"""The loops of indexes over vectors and codes: compiled, and the same in NumPy; engines and clustering take them from here."""
