"""DeferredConv as standard operators: the committed rows gathered, then CausalConvState."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.causal_conv_state.body import body as causal_conv_state_body
from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    x, weight, past, staged, accepted = inputs
    length = g.op("Squeeze", g.op("Shape", past, start=1, end=2))
    rows = g.op("Range", g.constant(0), length, g.constant(1))
    first = g.op("Unsqueeze", g.op("Cast", accepted, to=int(ir.DataType.INT64)), g.constant([1]))
    index = g.op("Unsqueeze", g.op("Add", first, rows), g.constant([2]))
    present = g.op("GatherND", g.op("Concat", past, staged, axis=1), index, batch_dims=1)
    output, _ = causal_conv_state_body(g, [x, weight, present])
    return [output, present, x]
