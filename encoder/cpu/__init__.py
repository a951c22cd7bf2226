"""Fast paths for CPUs behind `run_blocks`: the same blocks as `quiver.encoder.layers.Block`, run by kernels that numba compiles.

`blocks` runs and prepacks encoders; `linear` holds matrices; `support` says what this CPU can do and whether the kernels run a batch.
`block_kernels` and `attention` are the kernels, made of the operations in `tiles`, which `codegen` emits as LLVM vectors and `jit` compiles
and caches on disk. numba takes half a second to import and the kernels eight seconds to compile once, so import kernel modules
where they are used.
"""

from quiver.encoder.environment import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
