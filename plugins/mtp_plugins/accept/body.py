"""Accept as standard operators."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    draft, chosen = inputs
    int32, int64 = int(ir.DataType.INT32), int(ir.DataType.INT64)
    tokens = g.op("Shape", draft, start=1, end=2)
    scored = g.op("Slice", chosen, g.constant([0]), tokens, g.constant([1]))
    wrong = g.op("Cast", g.op("Not", g.op("Equal", draft, scored)), to=int32)
    # A row counts as long as nothing up to it was wrong.
    right = g.op("Equal", g.op("CumSum", wrong, g.constant(1)), g.constant(0, "int32"))
    accepted = g.op("ReduceSum", g.op("Cast", right, to=int32), g.constant([1]), keepdims=0)
    last = g.op("Unsqueeze", g.op("Cast", accepted, to=int64), g.constant([1]))
    columns = g.op("Range", g.constant(0), g.op("Squeeze", g.op("Shape", chosen, start=1, end=2)), g.constant(1))
    emitted = g.op("Where", g.op("LessOrEqual", columns, last), chosen, g.constant(0))
    next_token = g.op("Squeeze", g.op("GatherElements", chosen, last, axis=1), g.constant([1]))
    return [accepted, g.op("Add", accepted, g.constant(1, "int32")), emitted, next_token]
