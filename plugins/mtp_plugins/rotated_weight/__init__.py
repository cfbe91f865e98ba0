"""RotatedWeight: a matrix of floats from 8-bit integers with a scale for each row, stored rotated."""

from mtp_plugins.operator import Operator
from mtp_plugins.rotated_weight.body import body

OPERATOR = Operator(
    name="RotatedWeight",
    inputs=("values", "scales", "rotation"),
    outputs=("weight",),
    body=body,
)
"""Inputs: values uint8[columns, rows]; scales float32[rows]; rotation float32[size, size], symmetric and orthogonal, of
a size that divides the columns. Output: float32[rows, columns], every run of `size` columns of (values - 128)^T * scale
times the rotation.

x @ weight^T is (x rotated) @ ((values - 128) * scales): the product of integers needs a row of x in 8 bits, and a
rotation spreads the few large entries of a row over its neighbours, so that 8 bits with one scale a row are enough (the
idea of QuaRot, arXiv 2404.00456, with rotations of 64 columns). The layout is that of ONNX Runtime's
MatMulIntegerToFloat."""
