"""Kernels as plugins of TensorRT: what a plugin declares, and its registration. Importing it needs no TensorRT."""
