"""SkinnyProduct: rows times a weight, so that a row's bits do not depend on how many rows there are.

A matrix library takes another kernel for another number of rows, so that a row of a verify is not what the row alone
would be. Here every call, from one row to a prefill chunk, is the same tile of 16 rows with the same order of sums.
"""

from mtp_plugins.operator import Operator
from mtp_plugins.skinny_product.body import body

OPERATOR = Operator(
    name="SkinnyProduct",
    inputs=("x", "weight"),
    outputs=("output",),
    body=body,
    attributes=("to",),
)
"""Inputs: x T[batch, rows, in]; weight T[out, in], as checkpoints store it. T is float32, float16 or bfloat16.
Output: [batch, rows, out], float32 or T: the node's `to`, which it must have, is the number that ONNX gives the type.
Sums are in float32.

The rows of all sequences lie one behind the other in tiles of 16. Every tile reads the weight: once for 16 rows and
fewer, as for one, and 16 times for a chunk of 256 rows, side by side so that the second-level cache may serve most of
them. The kernel is for verifies; a chunk has it for equal bits, not for speed.

In order, inputs, the integer rows (batch * rows) and the output are the parameters of the kernel. That a row has the
same bits at every place of a tile is a property of the device's matrix instructions: each element of a tile is the same
tree of sums. The interpreter's tests show that the kernel relies on nothing else; the property itself is to be proved
on each device."""
