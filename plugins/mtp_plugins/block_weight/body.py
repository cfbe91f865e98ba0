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
    """float32[..., blocks, 32] for uint8[..., blocks, 4 * bits] and float32[..., blocks].

    A block of 32 bytes has 8 bits a value, one of 16 bytes 4: both are read off the shape, since the attribute
    of a function's node cannot choose operators.
    """
    # 2 for 4 bits, 1 for 8: how many values a byte holds.
    size = g.op("Cast", g.op("Shape", blocks, start=-1), to=int(ir.DataType.FLOAT))
    share = g.op("Div", g.constant([32.0], "float32"), size)
    # 16 or 256: a byte is high * base + low, and with 8 bits the high part is always 0 and cut off.
    base = g.op("Pow", g.constant([16.0], "float32"), g.op("Sub", g.constant([3.0], "float32"), share))
    bytes_ = g.op("Cast", blocks, to=int(ir.DataType.FLOAT))
    high = g.op("Floor", g.op("Div", bytes_, base))
    low = g.op("Sub", bytes_, g.op("Mul", high, base))
    last = g.constant([-1])
    pairs = g.op("Concat", g.op("Unsqueeze", low, last), g.op("Unsqueeze", high, last), axis=-1)
    kept = g.op("Slice", pairs, g.constant([0]), g.op("Cast", share, to=int(ir.DataType.INT64)), last)
    shape = g.op("Concat", g.op("Shape", scales), g.constant([32]), axis=0)
    values = g.op("Sub", g.op("Reshape", kept, shape), g.op("Div", base, g.constant([2.0], "float32")))
    return g.op("Mul", values, g.op("Unsqueeze", scales, last))
