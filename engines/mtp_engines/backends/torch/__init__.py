"""Graphs run by PyTorch, one operator after the other: on a CUDA device with our kernels, on a CPU by their bodies."""
