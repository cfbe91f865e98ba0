"""BlockRows: some rows of a matrix that is stored as blocks of 4-bit integers."""

from mtp_plugins.block_rows.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="BlockRows",
    inputs=("blocks", "scales", "turn", "columns", "ids"),
    outputs=("rows",),
    body=body,
)
"""Inputs: blocks, scales, turn and columns as BlockWeight takes them; ids int64[...]. Output: float32[..., columns],
the rows at ids. The matrix is never made whole: an embedding has hundreds of thousands of rows."""
