"""Products of rows with a rotated matrix of 8-bit integers, summed in integers.

Sums of integers have no order, and everything else is done for each entry alone: a row comes out the same whatever
rows stand beside it, on every processor. The kernel takes up to six rows for little more than one.
"""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import CONTRIB, GraphBuilder
from mtp_plugins.rotated_weight.reference import rotation

_MOST = 127.0
_SPLIT = 254.0
"""A remainder of at most half a step, in steps of the next term."""
_TERMS = 3
"""Terms of 8 bits that hold the 24 of a float32."""


class IntegerProducts:
    """Adds products to one graph; a row that several matrices multiply is rounded once."""

    def __init__(self, *, exact: bool) -> None:
        """`exact`: rows are taken apart into three terms instead of being rounded to 8 bits."""
        self._exact = exact
        self._rotations: dict[int, ir.Value] = {}
        self._rounded: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def add(
        self, g: GraphBuilder, x: ir.Value, values: ir.Value, scales: ir.Value, columns: int, *, axis: int
    ) -> ir.Value:
        """x @ weight^T for the operands of `RotatedWeight`.

        Args:
            g: builds nodes that come after those of earlier calls.
            x: float32[..., rows, columns], with its rows along `axis`.
            values: uint8[columns, out].
            scales: float32[out].
        """
        if x not in self._rounded:
            turned = self._rotate(g, x, columns, axis)
            greatest = g.op("ReduceMax", g.op("Abs", turned), g.constant([-1]), keepdims=1)
            # Of a row of zeros no unit is a number; whatever integers that gives, 0 is what they are multiplied with.
            unit = g.op("Div", turned, greatest)
            self._rounded[x] = (_terms(g, unit, axis) if self._exact else _rounded(g, unit)), greatest
        rows, greatest = self._rounded[x]
        step = 1.0 if self._exact else 1 / _MOST
        zero = g.constant(128, "uint8")
        found = g.op(
            "MatMulIntegerToFloat", rows, values, g.constant(step, "float32"), scales, zero, zero, domain=CONTRIB
        )
        return g.op("Mul", _sum_of_terms(g, found, axis) if self._exact else found, greatest)

    def _rotate(self, g: GraphBuilder, x: ir.Value, columns: int, axis: int) -> ir.Value:
        by = rotation(columns)
        if len(by) not in self._rotations:
            self._rotations[len(by)] = g.constant(by, "float32")
        keep = [0] * (axis + 1)
        runs = g.op("Reshape", x, g.constant([*keep, columns // len(by), len(by)]))
        turned = g.op("FusedMatMul", runs, self._rotations[len(by)], domain=CONTRIB)
        return g.op("Reshape", turned, g.constant([*keep, columns]))


def _rounded(g: GraphBuilder, unit: ir.Value) -> ir.Value:
    """uint8, -1 to 1 in 255 steps."""
    return g.op("QuantizeLinear", unit, g.constant(1 / _MOST, "float32"), g.constant(128, "uint8"))


def _terms(g: GraphBuilder, unit: ir.Value, axis: int) -> ir.Value:
    """uint8, the terms of every row behind each other: one product takes them all, so a matrix is packed once."""
    rest, terms = g.op("Mul", unit, g.constant(_MOST, "float32")), []
    for number in range(_TERMS):
        term = g.op("Round", rest)
        terms.append(g.op("Cast", g.op("Add", term, g.constant(128.0, "float32")), to=int(ir.DataType.UINT8)))
        if number < _TERMS - 1:
            rest = g.op("Mul", g.op("Sub", rest, term), g.constant(_SPLIT, "float32"))
    return g.op("Concat", *terms, axis=axis)


def _sum_of_terms(g: GraphBuilder, products: ir.Value, axis: int) -> ir.Value:
    """What the terms of `_terms` stand for, the smallest first."""
    parts = g.op_multi("Split", products, outputs=("first", "second", "third"), axis=axis, num_outputs=_TERMS)
    total = parts[-1]
    for part in parts[-2::-1]:
        total = g.op("Add", part, g.op("Div", total, g.constant(_SPLIT, "float32")))
    return g.op("Div", total, g.constant(_MOST, "float32"))
