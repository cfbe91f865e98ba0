"""One short run that proves kernels, CUDA graphs and the whole loop on a CUDA device with PyTorch and Triton."""
