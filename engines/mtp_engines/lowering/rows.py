"""Rows beside others, for kernels that round one row, or an odd one, differently."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def with_twin(g: GraphBuilder, x: ir.Value | None, rows: ir.Value, width: ir.Value, axis: int) -> ir.Value:
    """x with its first width - rows rows again behind it."""
    twin = g.op("Slice", x, g.constant([0]), g.op("Sub", width, rows), g.constant([axis]))
    return g.op("Concat", x, twin, axis=axis)
