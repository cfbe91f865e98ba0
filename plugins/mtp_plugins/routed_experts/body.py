"""RoutedExperts as standard operators: the matrices of each row's experts are gathered, then multiplied.

Right for every backend, and slow: it copies the experts of every row. A backend has a kernel of its own.
"""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    x, expert_ids, expert_weights, gate_up, down = inputs
    column = g.op("Unsqueeze", x, g.constant([2, 4]))
    both = g.op("MatMul", g.op("Gather", gate_up, expert_ids, axis=0), column)
    gate, up = g.op_multi("Split", both, outputs=("gate", "up"), axis=-2, num_outputs=2)
    inner = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
    outputs = g.op("Squeeze", g.op("MatMul", g.op("Gather", down, expert_ids, axis=0), inner), g.constant([-1]))
    weighted = g.op("Mul", outputs, g.op("Unsqueeze", expert_weights, g.constant([-1])))
    return [g.op("ReduceSum", weighted, g.constant([2]), keepdims=0)]
