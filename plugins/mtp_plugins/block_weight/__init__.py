"""BlockWeight: a matrix of floats from blocks of 4-bit integers with a scale each, stored turned."""

from mtp_plugins.block_weight.body import body
from mtp_plugins.operator import Operator

BLOCK = 64
"""Integers of a block."""
USED = BLOCK - 1
"""Columns of the matrix that a block stands for."""

OPERATOR = Operator(
    name="BlockWeight",
    inputs=("blocks", "scales", "turn", "columns"),
    outputs=("weight",),
    body=body,
)
"""Inputs: blocks uint8[rows, count, 32], each byte two values, the lower half first; scales float32[rows, count]; turn
float32[63, 64], whose rows are orthonormal and sum to zero; columns int64[1], how many of 63 * count there are. Output:
float32[rows, columns], every 63 columns of it (values - 8) * scale times the transpose of the turn.

x @ weight^T is (x turned) @ (values * scale)^T. What is subtracted from the values makes no difference, since a turned
run of x sums to zero: a kernel for unsigned integers needs no correction, and the integers need no zero point, wherever
their range lies. Turning spreads the few large entries of a row over its neighbours, too, as in RotatedWeight. The
layout is that of ONNX Runtime's MatMulNBits with blocks of 64 and a zero point of 0."""
