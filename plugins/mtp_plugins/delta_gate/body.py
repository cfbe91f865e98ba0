"""DeltaGate as standard operators."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    a, b, dt_bias, a_log = inputs
    rate = g.op("Neg", g.op("Exp", a_log))
    return [g.op("Mul", rate, g.op("Softplus", g.op("Add", a, dt_bias))), g.op("Sigmoid", b)]
