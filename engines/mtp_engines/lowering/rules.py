"""One function for each canonical operator: the ONNX Runtime CPU nodes that replace it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from mtp_engines.lowering.rows import with_twin
from mtp_plugins.block_rows.body import body as block_rows_body
from mtp_plugins.gated_delta.reference import L2_EPSILON
from mtp_plugins.graph import CONTRIB, GraphBuilder
from mtp_plugins.rotated_rows.body import body as rotated_rows_body

LEAST_QUERY_ROWS = 2
"""One query row takes another kernel and rounds differently; two or more agree to the last bit."""


def block_rows(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """The body: a few rows are made floats."""
    inputs = [value for value in node.inputs if value is not None]
    return block_rows_body(g, inputs)


def rotated_rows(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """The body: a few rows are made floats."""
    inputs = [value for value in node.inputs if value is not None]
    return rotated_rows_body(g, inputs)


def delta_gate(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """The contrib kernel: standard Softplus rounds differently for other row counts."""
    a, b, dt_bias, a_log = node.inputs
    rate = g.op("Neg", g.op("Exp", a_log))
    return g.op_multi("LinearAttentionGate", a, dt_bias, rate, b, outputs=("decay", "beta"), domain=CONTRIB)


def gated_delta(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """L2 norm through RMSNormalization, then the sequential contrib kernel."""
    query, key, value, decay, beta, past = node.inputs
    heads = (node.attributes["num_key_heads"].as_int(), node.attributes["num_value_heads"].as_int())
    assert past is not None and past.shape is not None
    key_dim = past.shape[2]
    assert isinstance(key_dim, int)
    unit_key = unit_rows(g, key, heads[0], key_dim)
    unit_query = unit_rows(g, query, heads[0], key_dim)
    output, present = recurrence(g, unit_query, [unit_key, value, decay, beta], past, heads, key_dim)
    return [output, present, unit_key]


def recurrence(
    g: GraphBuilder,
    unit_query: ir.Value,
    rows: Sequence[ir.Value | None],
    past: ir.Value,
    heads: tuple[int, int],
    key_dim: int,
) -> list[ir.Value]:
    """The output of every row and the state after the last one.

    Args:
        rows: unit key, value, decay and beta.
        heads: of the keys, and of the values.
    """
    key, value, decay, beta = rows
    return g.op_multi(
        "LinearAttention",
        *(unit_query, key, value, past, decay, beta),
        outputs=("output", "present"),
        domain=CONTRIB,
        q_num_heads=heads[0],
        kv_num_heads=heads[1],
        update_rule="gated_delta",
        scale=key_dim**-0.5,
    )


def unit_rows(g: GraphBuilder, x: ir.Value | None, heads: int, dim: int) -> ir.Value:
    """Every head of length 1: x / sqrt(sum(x^2) + eps) = RMSNorm(x; eps / dim) / sqrt(dim)."""
    split = g.op("Reshape", x, g.constant([0, 0, heads, dim]))
    scale = g.constant(np.full(dim, dim**-0.5), "float32")
    unit = g.op("RMSNormalization", split, scale, axis=-1, epsilon=L2_EPSILON / dim)
    return g.op("Reshape", unit, g.constant([0, 0, heads * dim]))


def headwise(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """A product with one constant matrix for each head: never fewer than `LEAST_QUERY_ROWS` rows, axis 2 of x."""
    x, weight = node.inputs
    assert weight is not None
    producer = weight.producer()
    rows = g.op("Shape", x, start=2, end=3)
    wide = with_twin(g, x, rows, g.op("Max", rows, g.constant([LEAST_QUERY_ROWS])), axis=2)
    if producer is None:
        product = g.op("MatMul", wide, weight)
    else:
        product = g.op("FusedMatMul", wide, producer.inputs[0], domain=CONTRIB, transB=1)
    return [g.op("Slice", product, g.constant([0]), rows, g.constant([2]))]


def group_query(
    g: GraphBuilder,
    inputs: Sequence[ir.Value | None],
    pasts: tuple[ir.Value | None, ir.Value | None],
    last: ir.Value,
    total: ir.Value,
    padding: ir.Value | None = None,
    bias: ir.Value | None = None,
    *,
    heads: tuple[int, int],
    scale: float,
) -> list[ir.Value]:
    """GroupQueryAttention: the output and both caches.

    Args:
        inputs: query, key and value, [batch, rows, heads * dim].
        pasts: key and value caches, [batch, heads, capacity, dim].
        last: int32[batch], the position of each sequence's last row.
        total: an int32 number that no position of the batch reaches.
        padding: int32[batch], how many of the rows each sequence has; a release before 1.32 does not know it.
        bias: float32[batch, 1, rows, total], added to the scores.
        heads: of the query, and of key and value.
    """
    return g.op_multi(
        "GroupQueryAttention",
        *inputs,
        *pasts,
        last,
        total,
        *([] if padding is None else [*([None] * 3), bias, *([None] * 5), padding]),
        outputs=("output", "present_key", "present_value"),
        domain=CONTRIB,
        num_heads=heads[0],
        kv_num_heads=heads[1],
        scale=scale,
    )


def int32(g: GraphBuilder, value: ir.Value) -> ir.Value:
    """The same numbers in 32 bits."""
    return g.op("Cast", value, to=int(ir.DataType.INT32))
