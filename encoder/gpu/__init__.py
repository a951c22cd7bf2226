"""GPU code: Triton kernels and compile options. Imported only where a GPU (or Triton's interpreter) runs it."""
