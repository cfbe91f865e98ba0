"""BlockWeight: a matrix of floats from blocks of small integers with a scale each."""

from mtp_plugins.block_weight.body import body
from mtp_plugins.operator import Operator

BLOCK = 32
"""Columns of a block."""

OPERATOR = Operator(
    name="BlockWeight",
    inputs=("blocks", "scales"),
    outputs=("weight",),
    body=body,
    attributes=("bits",),
)
"""Inputs: blocks uint8[rows, columns / 32, 4 * bits], each byte one value (`bits` 8) or two, the lower half first
(`bits` 4); scales float32[rows, columns / 32]. Output: float32[rows, columns], (value - 2 ** (bits - 1)) * scale.
It is the layout of ONNX Runtime's MatMulNBits, so a backend with such a kernel takes the blocks as they are."""
