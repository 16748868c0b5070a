"""Hand-callable Triton kernels: the eager CUDA path and the baseline of the benchmarks."""
