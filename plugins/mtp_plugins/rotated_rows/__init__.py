"""RotatedRows: some rows of a matrix that is stored rotated, in 8-bit integers."""

from mtp_plugins.operator import Operator
from mtp_plugins.rotated_rows.body import body

OPERATOR = Operator(
    name="RotatedRows",
    inputs=("values", "scales", "rotation", "ids"),
    outputs=("rows",),
    body=body,
)
"""Inputs: values uint8[rows, columns], not transposed as RotatedWeight's are; scales and rotation as there; ids
int64[...]. Output: float32[..., columns], the rows at ids. The matrix is never made whole."""
