"""Fast paths for CPUs behind `run_blocks`: the same blocks as `quiver.encoder.layers.Block`, run by kernels that numba compiles.

`blocks` decides whether the kernels run a batch, in inference and in training, and prepacks encoders; `attention` is their attention
backend; `linear` holds the matrices; `support` says what this CPU can do. `block_kernels` and `attention_kernels` are the kernels, made of
the operations in `tiles`, which `codegen` emits as LLVM vectors and `jit` compiles and caches on disk.

The kernels know nothing of modules or batches: tensors are passed as addresses. numba takes half a second to import and the kernels eight
seconds to compile once, so import kernel modules where they are used; `support`, `linear` and `blocks` load none of them.
"""

from quiver.encoder.exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
