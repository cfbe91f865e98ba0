"""PagedKvAppend as standard operators: one ScatterND into the pages of keys and one into those of values."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    key, value, key_pages, value_pages, block_table, lengths = inputs
    positions = new_positions(g, key, lengths)
    page_size, last = g.op("Shape", key_pages, start=1, end=2), g.constant([-1])
    # One column of no page behind the table, for rows that lie there.
    table = g.op("Pad", block_table, g.constant([0, 0, 0, 1]), g.constant(-1, "int32"))
    column = g.op("Min", g.op("Div", positions, page_size), g.op("Shape", block_table, start=1, end=2))
    page = g.op("GatherElements", table, column, axis=1)
    page = g.op("Cast", g.op("Max", page, g.constant(-1, "int32")), to=int(ir.DataType.INT64))
    slot = g.op("Mod", positions, page_size)
    places = g.op("Concat", g.op("Unsqueeze", page, last), g.op("Unsqueeze", slot, last), axis=-1)
    return [_write(g, rows, pages, places) for rows, pages in ((key, key_pages), (value, value_pages))]


def new_positions(g: GraphBuilder, rows: ir.Value, lengths: ir.Value) -> ir.Value:
    """int64[batch, rows]: lengths + row."""
    count = g.op("Squeeze", g.op("Shape", rows, start=1, end=2))
    first = g.op("Unsqueeze", g.op("Cast", lengths, to=int(ir.DataType.INT64)), g.constant([1]))
    return g.op("Add", first, g.op("Range", g.constant(0), count, g.constant(1)))


def _write(g: GraphBuilder, rows: ir.Value, pages: ir.Value, places: ir.Value) -> ir.Value:
    """The pages with float[batch, rows, num_kv_heads * head_dim] at int64[batch, rows, 2]; page -1 is none."""
    shape = g.op("Concat", g.op("Shape", rows, start=0, end=2), g.op("Shape", pages, start=2, end=4), axis=0)
    # ScatterND can leave no row out, but index -1 is the last page: one more takes those rows, and is cut off.
    spare = g.op("Slice", pages, g.constant([0]), g.constant([1]), g.constant([0]))
    written = g.op("ScatterND", g.op("Concat", pages, spare, axis=0), places, g.op("Reshape", rows, shape))
    return g.op("Slice", written, g.constant([0]), g.constant([-1]), g.constant([0]))
