"""The rows of GatedDelta all at once, without a loop, for backends that fuse nothing around one."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.gated_delta.body import axes, repeat_heads
from mtp_plugins.graph import GraphBuilder


def rows_together(
    g: GraphBuilder,
    query: ir.Value,
    unit_key: ir.Value,
    value: ir.Value,
    decay: ir.Value,
    beta: ir.Value,
    past: ir.Value,
    *,
    most_rows: int,
) -> tuple[ir.Value, ir.Value]:
    """What `scan_rows` computes, for at most `most_rows` rows; its arguments.

    With G the running sum of the decays, row i changes the state that fades to it by k_i d_i^T, where

        d_i = beta_i (v_i - exp(G_i) S^T k_i) - sum over j < i of A_ij d_j,  A_ij = beta_i exp(G_i - G_j) k_i.k_j

    which is a triangular system, (1 + A) d = b. A decay of minus infinity has no running sum and is not taken.
    """
    queries = _swapped(g, repeat_heads(g, query, past))
    keys = _swapped(g, repeat_heads(g, unit_key, past))
    shape = g.op("Concat", axes(g, value, 0, 2), axes(g, past, 1, 2), axes(g, past, 3, 4), axis=0)
    values = _swapped(g, g.op("Reshape", value, shape))
    last = g.constant([-1])
    rate = g.op("Unsqueeze", g.op("Transpose", beta, perm=[0, 2, 1]), last)
    total = g.op("CumSum", g.op("Transpose", decay, perm=[0, 2, 1]), g.constant(2))
    sums = g.op("Unsqueeze", total, last)
    row, column = _indices(g, value)
    between = g.op("Sub", sums, g.op("Unsqueeze", total, g.constant([2])))
    # Later rows are cut off before the exponential, which would overflow there.
    never = g.constant(float("-inf"), "float32")
    fade = g.op("Exp", g.op("Where", g.op("GreaterOrEqual", row, column), between, never))
    zero, transposed = g.constant(0.0, "float32"), g.op("Transpose", keys, perm=[0, 1, 3, 2])
    likeness = g.op("Mul", g.op("Mul", rate, g.op("MatMul", keys, transposed)), fade)
    coupling = g.op("Where", g.op("Greater", row, column), likeness, zero)
    since_past = g.op("Exp", sums)
    read = g.op("Mul", since_past, g.op("MatMul", keys, past))
    errors = g.op("Mul", rate, g.op("Sub", values, read))
    deltas = g.op("MatMul", _inverse(g, coupling, row, column, most_rows), errors)
    seen = g.op("MatMul", g.op("Mul", g.op("MatMul", queries, transposed), fade), deltas)
    output = g.op("Add", g.op("Mul", since_past, g.op("MatMul", queries, past)), seen)
    end = g.op("Slice", sums, last, g.constant([1 << 31]), g.constant([2]))
    left = g.op("Mul", transposed, g.op("Transpose", g.op("Exp", g.op("Sub", end, sums)), perm=[0, 1, 3, 2]))
    present = g.op("Add", g.op("Mul", g.op("Exp", end), past), g.op("MatMul", left, deltas))
    return g.op("Reshape", _swapped(g, output), g.op("Shape", value)), present


def _swapped(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """[batch, rows, heads, dim] <-> [batch, heads, rows, dim]."""
    return g.op("Transpose", x, perm=[0, 2, 1, 3])


def _indices(g: GraphBuilder, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """int64[rows, 1] and int64[rows]: a row's place, down and across."""
    rows = g.op("Range", g.constant(0), g.op("Squeeze", axes(g, value, 1, 2)), g.constant(1))
    return g.op("Unsqueeze", rows, g.constant([1])), rows


def _inverse(g: GraphBuilder, coupling: ir.Value, row: ir.Value, column: ir.Value, most_rows: int) -> ir.Value:
    """The inverse of 1 + coupling, which is zero on and above its diagonal.

    The blocks on the diagonal are inverted already when they are joined in pairs to blocks of twice the size: only
    sums of products as in a substitution occur, never a power of the matrix, which would overflow.
    """
    one, zero = g.constant(1.0, "float32"), g.constant(0.0, "float32")
    inverse, size = g.op("Where", g.op("Equal", row, column), one, zero), 1
    while size < most_rows:
        pair = g.op("Equal", *(g.op("Div", place, g.constant(2 * size)) for place in (row, column)))
        block = g.op("Equal", *(g.op("Div", place, g.constant(size)) for place in (row, column)))
        beside = g.op("Where", g.op("And", pair, g.op("Not", block)), coupling, zero)
        inverse = g.op("Sub", inverse, g.op("MatMul", g.op("MatMul", inverse, beside), inverse))
        size *= 2
    return inverse
