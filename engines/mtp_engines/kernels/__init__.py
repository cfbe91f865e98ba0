"""Kernels of our own for ONNX Runtime on a CPU: products of rows with matrices of 4 and 8 bits.

`source/` is compiled when the package is installed (`build`); without them ONNX Runtime's kernels run, see `library`.
"""
