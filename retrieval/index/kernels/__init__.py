"""Compiled kernels for vectors and codes, with NumPy references; engines and clustering use them."""
