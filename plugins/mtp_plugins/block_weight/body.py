"""BlockWeight as standard operators."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    blocks, scales = inputs
    rows = g.op("Shape", scales, start=0, end=1)
    return [g.op("Reshape", dequantise(g, blocks, scales), g.op("Concat", rows, g.constant([-1]), axis=0))]


def dequantise(g: GraphBuilder, blocks: ir.Value, scales: ir.Value) -> ir.Value:
    """float32[..., blocks, 32] for uint8[..., blocks, 16] and float32[..., blocks]."""
    last, half = g.constant([-1]), g.constant(16.0, "float32")
    bytes_ = g.op("Cast", blocks, to=int(ir.DataType.FLOAT))
    high = g.op("Floor", g.op("Div", bytes_, half))
    low = g.op("Sub", bytes_, g.op("Mul", high, half))
    pairs = g.op("Concat", g.op("Unsqueeze", low, last), g.op("Unsqueeze", high, last), axis=-1)
    shape = g.op("Concat", g.op("Shape", scales), g.constant([32]), axis=0)
    values = g.op("Sub", g.op("Reshape", pairs, shape), g.constant(8.0, "float32"))
    return g.op("Mul", values, g.op("Unsqueeze", scales, last))
