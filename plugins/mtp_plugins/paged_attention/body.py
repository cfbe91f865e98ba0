"""PagedAttention as standard operators: the pages of each sequence gathered, then Attention with a mask."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder
from mtp_plugins.paged_kv_append.body import new_positions

_INT32 = int(ir.DataType.INT32)


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes; heads and widths are read from the pages and the query."""
    query, key_pages, value_pages, block_table, lengths = inputs
    positions = new_positions(g, query, lengths)
    page_size, columns = g.op("Shape", key_pages, start=1, end=2), g.op("Shape", block_table, start=1, end=2)
    capacity = _range(g, g.op("Mul", columns, page_size))
    visible = g.op("LessOrEqual", capacity, g.op("Unsqueeze", positions, g.constant([1, 3])))
    end = g.op("Slice", positions, g.constant([-1]), g.constant([2**63 - 1]), g.constant([1]))
    # Columns that are not in use may name no page at all.
    used = g.op("LessOrEqual", g.op("Mul", _range(g, columns), page_size), end)
    zero = g.constant(0, "int32")
    named = g.op("And", used, g.op("GreaterOrEqual", block_table, zero))
    table = g.op("Where", named, block_table, zero)
    in_page = g.op("GatherElements", g.op("Cast", named, to=_INT32), _columns(g, capacity, page_size, named), axis=1)
    stored = g.op("And", g.op("LessOrEqual", capacity, end), g.op("Greater", in_page, zero))
    attended = g.op(
        "Attention",
        _split_heads(g, query, key_pages),
        _gather(g, key_pages, table, stored),
        _gather(g, value_pages, table, stored),
        visible,
    )
    node = attended.producer()
    assert node is not None
    node.attributes.add(ir.RefAttr("scale", "scale", ir.AttributeType.FLOAT))
    return [g.op("Reshape", g.op("Transpose", attended, perm=[0, 2, 1, 3]), g.op("Shape", query))]


def _columns(g: GraphBuilder, capacity: ir.Value, page_size: ir.Value, table: ir.Value) -> ir.Value:
    """int64[batch, capacity]: the column of the table for every position."""
    shape = g.op("Concat", g.op("Shape", table, start=0, end=1), g.op("Shape", capacity), axis=0)
    return g.op("Expand", g.op("Div", capacity, page_size), shape)


def _range(g: GraphBuilder, count: ir.Value) -> ir.Value:
    return g.op("Range", g.constant(0), g.op("Squeeze", count), g.constant(1))


def _split_heads(g: GraphBuilder, query: ir.Value, pages: ir.Value) -> ir.Value:
    """[batch, rows, heads * head_dim] -> [batch, heads, rows, head_dim]."""
    head_dim = g.op("Shape", pages, start=3, end=4)
    shape = g.op("Concat", g.op("Shape", query, start=0, end=2), g.constant([-1]), head_dim, axis=0)
    return g.op("Transpose", g.op("Reshape", query, shape), perm=[0, 2, 1, 3])


def _gather(g: GraphBuilder, pages: ir.Value, table: ir.Value, stored: ir.Value) -> ir.Value:
    """[batch, kv_heads, capacity, head_dim]: the rows of each sequence in order of position, zero behind its end."""
    batch, tail = g.op("Shape", table, start=0, end=1), g.op("Shape", pages, start=2, end=4)
    shape = g.op("Concat", batch, g.constant([-1]), tail, axis=0)
    rows = g.op("Reshape", g.op("Gather", pages, table, axis=0), shape)
    # What lies behind the end may be NaN, which a weight of zero would not remove.
    nothing = g.op("CastLike", g.constant(0.0, "float32"), pages)
    rows = g.op("Where", g.op("Unsqueeze", stored, g.constant([2, 3])), rows, nothing)
    return g.op("Transpose", rows, perm=[0, 2, 1, 3])
