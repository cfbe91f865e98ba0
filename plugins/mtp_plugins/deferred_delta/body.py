"""DeferredDelta as standard operators: Scans over the staged rows, over the new ones, and over those that are kept."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.gated_delta.body import axes, scan_rows
from mtp_plugins.gated_delta.body import body as gated_delta_body
from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    query, key, value, decay, beta, past = inputs[:6]
    staged, (accepted, kept) = inputs[6:10], inputs[10:]
    committed = _commit(g, past, staged, accepted)
    output, _, unit_key = gated_delta_body(g, [query, key, value, decay, beta, committed])
    new = [unit_key, value, decay, beta]
    present = _commit(g, committed, new, kept)
    return [output, present, *(stored(g, rows, room) for rows, room in zip(new, staged, strict=True))]


def stored(g: GraphBuilder, rows: ir.Value, room: ir.Value) -> ir.Value:
    """The first rows of float[batch, rows, width], as many as `room` has, and zeros behind them."""
    nothing = g.op("Expand", g.op("CastLike", g.constant(0.0, "float32"), rows), g.op("Shape", room))
    one = g.constant([1])
    return g.op("Slice", g.op("Concat", rows, nothing, axis=1), g.constant([0]), axes(g, room, 1, 2), one)


def _commit(g: GraphBuilder, past: ir.Value, rows: list[ir.Value], count: ir.Value) -> ir.Value:
    """The state after the first `count` int32[batch] of the rows (unit key, value, decay, beta)."""
    key, value, decay, beta = rows
    kept, zero = _kept(g, decay, count), g.constant(0.0, "float32")
    head_shape = g.op("Concat", axes(g, key, 0, 2), g.constant([-1]), axes(g, past, 2, 3), axis=0)
    # A row with decay 0 and beta 0 is an exact identity; its key and value are cleared because 0 * inf is not 0.
    heads = g.op("Reshape", g.op("Where", kept, key, zero), head_shape)
    value, decay, beta = (g.op("Where", kept, part, zero) for part in (value, decay, beta))
    _, present = scan_rows(g, heads, heads, value, decay, beta, past)
    return present


def _kept(g: GraphBuilder, decay: ir.Value, count: ir.Value) -> ir.Value:
    """bool[batch, rows, 1], true for the rows that are made permanent."""
    rows = g.op("Range", g.constant(0), g.op("Squeeze", axes(g, decay, 1, 2)), g.constant(1))
    wide = g.op("Unsqueeze", g.op("Cast", count, to=int(ir.DataType.INT64)), g.constant([1, 2]))
    return g.op("Less", g.op("Unsqueeze", rows, g.constant([1])), wide)
