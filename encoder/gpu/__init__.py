"""GPU code: Triton kernels, CUDA graphs and compile options. Nothing here is imported on a machine without a GPU."""
