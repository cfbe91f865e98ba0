"""The short convolution as products and sums of shifted rows.

ONNX Runtime 1.32 has a kernel for it, CausalConvWithState, which goes through channels one by one: with 6144 of them
and two threads it takes 90 us for one row, 296 for four and 6.5 ms for 128, these operators 14, 28 and 619 us.
"""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder

_END = 9223372036854775807
"""A Slice end that means "up to the last row"."""


def causal_conv_state(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """Entry by entry, so that neither rows nor channels depend on how many there are."""
    x, weight, past = node.inputs
    assert weight is not None and weight.shape is not None
    channels, _, taps = weight.shape
    assert isinstance(taps, int)
    window = g.op("Concat", past, x, axis=1)
    # Folded when the session is opened.
    by_tap = g.op("Transpose", g.op("Squeeze", weight, g.constant([1])), perm=[1, 0])
    parts = [by_tap]
    if taps > 1:
        parts = g.op_multi("Split", by_tap, outputs=[f"tap{tap}" for tap in range(taps)], axis=0, num_outputs=taps)
    total = g.op("Mul", x, parts[-1])
    for tap in reversed(range(taps - 1)):
        shifted = _rows(g, window, tap, tap + 1 - taps)
        # Its size is not inferred, and unless it is known, nothing is written over: 0.2 GB more for a prompt.
        shifted.type, shifted.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", "rows", channels])
        total = g.op("Add", total, g.op("Mul", shifted, parts[tap]))
    return [g.op("Mul", total, g.op("Sigmoid", total)), rows_before_next(g, window, taps - 1)]


def rows_before_next(g: GraphBuilder, window: ir.Value, count: int) -> ir.Value:
    """The last `count` rows of a window, which the row behind it needs."""
    return _rows(g, window, -count if count else _END, _END)


def _rows(g: GraphBuilder, x: ir.Value | None, start: int, end: int) -> ir.Value:
    return g.op("Slice", x, g.constant([start]), g.constant([end]), g.constant([1]))
