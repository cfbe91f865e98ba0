"""RotatedWeight as standard operators."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    values, scales, rotation = inputs
    return [rotated(g, g.op("Transpose", values, perm=[1, 0]), scales, rotation)]


def rotated(g: GraphBuilder, values: ir.Value, scales: ir.Value, rotation: ir.Value) -> ir.Value:
    """float32[..., columns] for uint8[..., columns], float32[...] and float32[size, size]."""
    last = g.constant([-1])
    centred = g.op("Sub", g.op("Cast", values, to=int(ir.DataType.FLOAT)), g.constant(128.0, "float32"))
    stored = g.op("Mul", centred, g.op("Unsqueeze", scales, last))
    leading = g.op("Shape", scales)
    runs = g.op("Concat", leading, last, g.op("Shape", rotation, start=0, end=1), axis=0)
    turned = g.op("MatMul", g.op("Reshape", stored, runs), rotation)
    return g.op("Reshape", turned, g.op("Concat", leading, last, axis=0))
