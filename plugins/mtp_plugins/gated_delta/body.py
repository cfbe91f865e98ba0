"""GatedDelta as standard operators: a Scan over the rows."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from mtp_plugins.gated_delta.reference import L2_EPSILON
from mtp_plugins.graph import GraphBuilder

RowsForm = Callable[..., tuple[ir.Value, ir.Value]]
"""Computes all rows from what `scan_rows` takes, and returns what that does."""


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes; heads and widths are read from past_state and key."""
    return body_with(g, inputs, scan_rows)


def body_with(g: GraphBuilder, inputs: list[ir.Value], rows_form: RowsForm) -> list[ir.Value]:
    """The body whose rows are computed in another form than a Scan."""
    query, key, value, decay, beta, past = inputs
    key_dim = axes(g, past, 2, 3)
    unit_query = _unit(g, _split_heads(g, query, key_dim))
    unit_key = _unit(g, _split_heads(g, key, key_dim))
    scale = g.op("Reciprocal", g.op("Sqrt", g.op("Cast", key_dim, to=int(ir.DataType.FLOAT))))
    output, present = rows_form(g, g.op("Mul", unit_query, scale), unit_key, value, decay, beta, past)
    return [output, present, g.op("Reshape", unit_key, g.op("Shape", key))]


def scan_rows(
    g: GraphBuilder,
    query: ir.Value,
    unit_key: ir.Value,
    value: ir.Value,
    decay: ir.Value,
    beta: ir.Value,
    past: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Output of every row, like `value`, and the state after the last one.

    query (scaled) and unit_key are [batch, rows, num_key_heads, key_dim], the others as `OPERATOR` says.
    """
    value_shape = g.op("Concat", axes(g, value, 0, 2), axes(g, past, 1, 2), axes(g, past, 3, 4), axis=0)
    rows = g.op_multi(
        "Scan",
        past,
        repeat_heads(g, query, past),
        repeat_heads(g, unit_key, past),
        g.op("Reshape", value, value_shape),
        decay,
        beta,
        outputs=("state", "rows"),
        body=_row(),
        num_scan_inputs=5,
        scan_input_axes=[1] * 5,
        scan_output_axes=[1],
    )
    return g.op("Reshape", rows[1], g.op("Shape", value)), rows[0]


def axes(g: GraphBuilder, value: ir.Value, start: int, end: int) -> ir.Value:
    """Sizes of the axes start..end-1 of a value."""
    return g.op("Shape", value, start=start, end=end)


def _split_heads(g: GraphBuilder, x: ir.Value, head_dim: ir.Value) -> ir.Value:
    return g.op("Reshape", x, g.op("Concat", axes(g, x, 0, 2), g.constant([-1]), head_dim, axis=0))


def _unit(g: GraphBuilder, x: ir.Value) -> ir.Value:
    squares = g.op("ReduceSum", g.op("Mul", x, x), g.constant([-1]), keepdims=1)
    return g.op("Div", x, g.op("Sqrt", g.op("Add", squares, g.constant(L2_EPSILON, "float32"))))


def repeat_heads(g: GraphBuilder, x: ir.Value, past: ir.Value) -> ir.Value:
    """[batch, rows, key_heads, dim] -> [batch, rows, value_heads, dim], each head r times in a row."""
    heads = axes(g, x, 2, 3)
    times = g.op("Div", axes(g, past, 1, 2), heads)
    wide = g.op("Concat", axes(g, x, 0, 3), times, axes(g, x, 3, 4), axis=0)
    final = g.op("Concat", axes(g, x, 0, 2), axes(g, past, 1, 2), axes(g, x, 3, 4), axis=0)
    return g.op("Reshape", g.op("Expand", g.op("Unsqueeze", x, g.constant([3])), wide), final)


def _row() -> ir.Graph:
    b = GraphBuilder("row")
    float_type = ir.TensorType(ir.DataType.FLOAT)
    names = ("state_in", "query", "key", "value", "decay", "beta")
    state, query, key, value, decay, beta = (ir.Value(name=f"row.{name}", type=float_type) for name in names)
    b.inputs = [state, query, key, value, decay, beta]
    with b.scope("row"):
        last = b.constant([-1])
        column, middle = b.op("Unsqueeze", key, last), b.constant([2])
        faded = b.op("Mul", state, b.op("Unsqueeze", b.op("Exp", decay), b.constant([2, 3])))
        read = b.op("MatMul", b.op("Unsqueeze", key, middle), faded)
        error = b.op("Sub", b.op("Unsqueeze", value, middle), read)
        delta = b.op("Mul", error, b.op("Unsqueeze", beta, b.constant([2, 3])))
        state_out = b.op("Add", faded, b.op("Mul", column, delta))
        output = b.op("Squeeze", b.op("MatMul", b.op("Unsqueeze", query, middle), state_out), middle)
    for value_out in (state_out, output):
        value_out.type = float_type
        b.outputs.append(value_out)
    return b.graph()
