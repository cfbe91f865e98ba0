"""CachedAttention as standard operators: TensorScatter, then Attention with an explicit mask."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes; heads and widths are read from past_key and query."""
    query, key, value, past_key, past_value, past_length = inputs
    present_key = _append(g, key, past_key, past_length)
    present_value = _append(g, value, past_value, past_length)
    return [attend(g, query, present_key, present_value, past_key, past_length), present_key, present_value]


def attend(
    g: GraphBuilder, query: ir.Value, key: ir.Value, value: ir.Value, past: ir.Value, past_length: ir.Value
) -> ir.Value:
    """Query rows over caches that hold the new rows; `past` gives the sizes, since its shape is known."""
    output = g.op("Attention", _split_heads(g, query, past), key, value, _visible(g, query, past, past_length))
    rows = g.op("Transpose", output, perm=[0, 2, 1, 3])
    return g.op("Reshape", rows, g.op("Shape", query))


def _split_heads(g: GraphBuilder, x: ir.Value, past: ir.Value) -> ir.Value:
    """[batch, rows, heads * head_dim] -> [batch, heads, rows, head_dim]."""
    batch_rows, head_dim = g.op("Shape", x, start=0, end=2), g.op("Shape", past, start=3, end=4)
    shape = g.op("Concat", batch_rows, g.constant([-1]), head_dim, axis=0)
    return g.op("Transpose", g.op("Reshape", x, shape), perm=[0, 2, 1, 3])


def _append(g: GraphBuilder, rows: ir.Value, past: ir.Value, past_length: ir.Value) -> ir.Value:
    return g.op("TensorScatter", past, _split_heads(g, rows, past), past_length, axis=2)


def _visible(g: GraphBuilder, query: ir.Value, past: ir.Value, past_length: ir.Value) -> ir.Value:
    """bool[batch, 1, rows, capacity]: key position <= past_length + row."""
    zero, one = g.constant(0), g.constant(1)
    columns = g.op("Range", zero, g.op("Squeeze", g.op("Shape", past, start=2, end=3)), one)
    rows = g.op("Range", zero, g.op("Squeeze", g.op("Shape", query, start=1, end=2)), one)
    last = g.op("Add", g.op("Unsqueeze", past_length, g.constant([1])), rows)
    return g.op("LessOrEqual", columns, g.op("Unsqueeze", last, g.constant([1, 3])))
