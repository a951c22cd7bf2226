"""Loops for CPUs that torch's operators leave slow, compiled by numba when they are first called and kept on disk.

`tiles` has what is written in LLVM's vector types, `attention` the loops around it, `team` the threads they run on. Nothing here knows
of modules or batches; torch's tensors come as addresses. numba takes half a second to import: import these modules where they are used.
"""
