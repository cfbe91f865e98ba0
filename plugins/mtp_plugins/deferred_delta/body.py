"""DeferredDelta as standard operators: two Scans, over the staged rows and over the new ones."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.gated_delta.body import axes, scan_rows
from mtp_plugins.gated_delta.body import body as gated_delta_body
from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    query, key, value, decay, beta, past, staged_key, staged_value, staged_decay, staged_beta, accepted = inputs
    kept = _kept(g, staged_decay, accepted)
    zero = g.constant(0.0, "float32")
    head_shape = g.op("Concat", axes(g, staged_key, 0, 2), g.constant([-1]), axes(g, past, 2, 3), axis=0)
    heads = g.op("Reshape", g.op("Where", kept, staged_key, zero), head_shape)
    # A row with decay 0 and beta 0 is an exact identity; its key and value are cleared because 0 * inf is not 0.
    _, present = scan_rows(
        g,
        heads,
        heads,
        g.op("Where", kept, staged_value, zero),
        g.op("Where", kept, staged_decay, zero),
        g.op("Where", kept, staged_beta, zero),
        past,
    )
    output, _, unit_key = gated_delta_body(g, [query, key, value, decay, beta, present])
    return [output, present, unit_key, value, decay, beta]


def _kept(g: GraphBuilder, staged_decay: ir.Value, accepted: ir.Value) -> ir.Value:
    """bool[batch, staged_rows, 1], true for the rows that are made permanent."""
    count = g.op("Squeeze", axes(g, staged_decay, 1, 2))
    rows = g.op("Range", g.constant(0), count, g.constant(1))
    wide = g.op("Unsqueeze", g.op("Cast", accepted, to=int(ir.DataType.INT64)), g.constant([1, 2]))
    return g.op("Less", g.op("Unsqueeze", rows, g.constant([1])), wide)
