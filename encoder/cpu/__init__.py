"""Loops for CPUs that torch's operators leave slow, compiled by numba when they are first called and kept on disk.

`vectors` makes code in LLVM's vector types and `amx` products by a matrix unit, `tiles` and `layer_tiles` are the pieces made of it,
`attention` and `blocks` the loops around them, `team` the threads they run on. Nothing here knows of modules or batches; torch's tensors
come as addresses. `hadamard` says with torch's operators what the loops do with features before they are integers. numba takes half a
second to import, and the loops eight to compile once: import these modules where they are used, but for `availability` and `hadamard`,
which load none.
"""
