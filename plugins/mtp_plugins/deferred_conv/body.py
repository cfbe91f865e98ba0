"""DeferredConv as standard operators: the committed rows gathered, CausalConvState, and the kept rows gathered."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.causal_conv_state.body import body as causal_conv_state_body
from mtp_plugins.deferred_delta.body import stored
from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    x, weight, past, staged, accepted, kept = inputs
    committed = _commit(g, past, staged, accepted)
    output, _ = causal_conv_state_body(g, [x, weight, committed])
    return [output, _commit(g, committed, x, kept), stored(g, x, staged)]


def _commit(g: GraphBuilder, past: ir.Value, rows: ir.Value, count: ir.Value) -> ir.Value:
    """As many raw rows as `past` has, up to the first `count` int32[batch] of the rows behind it."""
    length = g.op("Squeeze", g.op("Shape", past, start=1, end=2))
    place = g.op("Range", g.constant(0), length, g.constant(1))
    first = g.op("Unsqueeze", g.op("Cast", count, to=int(ir.DataType.INT64)), g.constant([1]))
    index = g.op("Unsqueeze", g.op("Add", first, place), g.constant([2]))
    return g.op("GatherND", g.op("Concat", past, rows, axis=1), index, batch_dims=1)
