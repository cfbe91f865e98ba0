"""CausalConvState as standard operators."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder

_END = 9223372036854775807
"""A Slice end that means "up to the last row"."""


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes.

    A grouped Conv would need its group count as an attribute; gathered windows read every size from
    the shapes.
    """
    x, weight, past = inputs
    rows = g.op("Shape", x, start=1, end=2)
    window = g.op("Concat", past, x, axis=1)
    index = g.op(
        "Add",
        g.op("Unsqueeze", _range(g, rows), g.constant([1])),
        _range(g, g.op("Shape", weight, start=2, end=3)),
    )
    taps = g.op("Transpose", g.op("Squeeze", weight, g.constant([1])), perm=[1, 0])
    products = g.op("Mul", g.op("Gather", window, index, axis=1), taps)
    total = g.op("ReduceSum", products, g.constant([2]), keepdims=0)
    output = g.op("Mul", total, g.op("Sigmoid", total))
    return [output, g.op("Slice", window, rows, g.constant([_END]), g.constant([1]))]


def _range(g: GraphBuilder, count: ir.Value) -> ir.Value:
    return g.op("Range", g.constant(0), g.op("Squeeze", count), g.constant(1))
