"""BlockWeight: a matrix of floats from blocks of 4-bit integers with a scale each."""

from mtp_plugins.block_weight.body import body
from mtp_plugins.operator import Operator

BLOCK = 32
"""Columns of a block."""

OPERATOR = Operator(
    name="BlockWeight",
    inputs=("blocks", "scales"),
    outputs=("weight",),
    body=body,
)
"""Inputs: blocks uint8[rows, columns / 32, 16], each byte two values, the lower half first; scales float32[rows,
columns / 32]. Output: float32[rows, columns], (value - 8) * scale. It is the layout of ONNX Runtime's MatMulNBits, so a
backend with such a kernel takes the blocks as they are."""
