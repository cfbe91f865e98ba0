"""BlockWeight as standard operators."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    return [dequantise(g, *inputs)]


def dequantise(g: GraphBuilder, blocks: ir.Value, scales: ir.Value, turn: ir.Value, columns: ir.Value) -> ir.Value:
    """float32[..., columns] for uint8[..., count, 32], float32[..., count], float32[63, 64] and int64[1]."""
    last, half = g.constant([-1]), g.constant(16.0, "float32")
    bytes_ = g.op("Cast", blocks, to=int(ir.DataType.FLOAT))
    high = g.op("Floor", g.op("Div", bytes_, half))
    low = g.op("Sub", bytes_, g.op("Mul", high, half))
    pairs = g.op("Concat", g.op("Unsqueeze", low, last), g.op("Unsqueeze", high, last), axis=-1)
    shape = g.op("Concat", g.op("Shape", scales), g.op("Shape", turn, start=1, end=2), axis=0)
    values = g.op("Sub", g.op("Reshape", pairs, shape), g.constant(8.0, "float32"))
    stored = g.op("Mul", values, g.op("Unsqueeze", scales, last))
    turned = g.op("MatMul", stored, g.op("Transpose", turn, perm=[1, 0]))
    leading = g.op("Shape", scales, end=-1)
    flat = g.op("Reshape", turned, g.op("Concat", leading, last, axis=0))
    return g.op("Slice", flat, g.constant([0]), columns, last)
