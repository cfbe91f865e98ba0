"""What all GPU kernels share: how one is launched, and how it becomes PTX. Importing it needs no triton."""
