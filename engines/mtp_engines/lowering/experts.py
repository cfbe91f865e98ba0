"""RoutedExperts on a CPU: a loop over the experts that any row was sent to."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import CONTRIB, GraphBuilder


def routed_experts(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """Each expert that was chosen takes its rows together, so its matrices are read once.

    A row's sum is taken in the order of its experts' numbers, whatever the other rows chose.
    """
    x, expert_ids, expert_weights, gate_up, down = node.inputs
    assert gate_up is not None and gate_up.shape is not None and down is not None
    hidden = gate_up.shape[2]
    assert isinstance(hidden, int)
    rows = g.op("Reshape", x, g.constant([-1, hidden]))
    last = g.op("Shape", expert_ids, start=2, end=3)
    flat = g.op("Concat", g.constant([-1]), last, axis=0)
    ids, weights = g.op("Reshape", expert_ids, flat), g.op("Reshape", expert_weights, flat)
    used = g.op_multi("Unique", ids, outputs=("values",), sorted=1)[0]
    body = _one_expert(rows, ids, weights, used, gate_up, down)
    count = g.op("Squeeze", g.op("Shape", used))
    total = g.op("Loop", count, None, g.op("Mul", rows, g.constant(0.0, "float32")), body=body)
    return [g.op("Reshape", total, g.op("Shape", x))]


def _one_expert(
    rows: ir.Value, ids: ir.Value, weights: ir.Value, used: ir.Value, gate_up: ir.Value, down: ir.Value
) -> ir.Graph:
    """Loop body: (step, condition, sum) -> (condition, sum with the rows of expert used[step] added)."""
    g = GraphBuilder("expert")
    with g.scope(f"{rows.name}.expert"):
        step = g.input(f"{rows.name}.step", "int64", [])
        condition = ir.Value(name=f"{rows.name}.condition", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        g.inputs.append(condition)
        total = g.input(f"{rows.name}.sum", "float32", ["rows", "hidden"])
        expert = g.op("Gather", used, step, axis=0)
        places = g.op("Transpose", g.op("NonZero", g.op("Equal", ids, expert)), perm=[1, 0])
        mine = g.op("Slice", places, g.constant([0]), g.constant([1]), g.constant([1]))
        taken, count = _at_least_two(g, g.op("GatherND", rows, mine))
        both = g.op("FusedMatMul", taken, g.op("Gather", gate_up, expert, axis=0), domain=CONTRIB, transB=1)
        gate, up = g.op_multi("Split", both, outputs=("gate", "up"), axis=-1, num_outputs=2)
        inner = g.op("Mul", g.op("Mul", gate, g.op("Sigmoid", gate)), up)
        outputs = g.op("FusedMatMul", inner, g.op("Gather", down, expert, axis=0), domain=CONTRIB, transB=1)
        kept = g.op("Slice", outputs, g.constant([0]), count, g.constant([0]))
        weighted = g.op("Mul", kept, g.op("Unsqueeze", g.op("GatherND", weights, places), g.constant([1])))
        g.outputs.append(g.op("Identity", condition))
        g.outputs.append(g.op("ScatterND", total, mine, weighted, reduction="add"))
        for value, kind in zip(g.outputs, (ir.DataType.BOOL, ir.DataType.FLOAT), strict=True):
            value.type = ir.TensorType(kind)
    return g.graph()


def _at_least_two(g: GraphBuilder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A lone row twice, since a product with one row takes another kernel; and how many rows there were."""
    count = g.op("Shape", x, start=0, end=1)
    twin = g.op("Slice", x, g.constant([0]), g.op("Sub", g.constant([2]), count), g.constant([0]))
    return g.op("Concat", x, twin, axis=0), count
