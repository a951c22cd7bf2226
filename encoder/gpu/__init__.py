"""GPU code: Triton kernels and CUDA graphs. Imported only where a GPU (or Triton's interpreter) runs it."""
