"""Attention as products and a softmax, for backends whose own attention cannot be relied on."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def spell_out_attention(graph: ir.Graph) -> None:
    """Replace every Attention over a cache and a mask.

    Scores are rounded to the type of the cache, scaled and normalised in float32, and rounded again.

    TensorRT-RTX 1.7.1 finds no fused kernel for some of many equal attentions as soon as there are several profiles
    (24 layers of the 0.8B shape), and ends the process when it may take them apart itself. A version that builds the
    slow test of the builder without this lets it go.
    """
    for node in list(graph):
        if node.op_type == "Attention":
            builder = GraphBuilder("attention")
            with builder.scope(node.name or node.op_type):
                output = _attend(builder, node)
            ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, list(node.outputs), [output])


def _attend(g: GraphBuilder, node: ir.Node) -> ir.Value:
    """[batch, heads, rows, dim] like the query."""
    query, key, value, mask = node.inputs
    assert mask is not None
    dtype, kv_heads, dim = _cache_of(key)
    batch = g.op("Shape", query, start=0, end=1)
    # The query heads of one cached head lie behind each other, so its cache is read once for all of them.
    grouped = g.op("Reshape", query, g.op("Concat", batch, g.constant([kv_heads, -1, dim]), axis=0))
    product = g.op("MatMul", grouped, g.op("Transpose", key, perm=[0, 1, 3, 2]))
    scores = g.op("Mul", _cast(g, product, dtype, ir.DataType.FLOAT), g.constant(dim**-0.5, "float32"))
    by_head = g.op("Concat", batch, g.constant([kv_heads, -1]), g.op("Shape", mask, start=2, end=4), axis=0)
    seen = g.op(
        "Where",
        g.op("Unsqueeze", mask, g.constant([2])),
        g.op("Reshape", scores, by_head),
        g.constant(float("-inf"), "float32"),
    )
    weights = _cast(g, g.op("Softmax", seen, axis=-1), ir.DataType.FLOAT, dtype)
    output = g.op("MatMul", g.op("Reshape", weights, g.op("Shape", product)), value)
    return g.op("Reshape", output, g.op("Shape", query))


def _cache_of(key: ir.Value | None) -> tuple[ir.DataType, int, int]:
    """Type, heads and width of the cache that a key is, with its new rows."""
    update = key.producer() if key is not None else None
    assert update is not None and update.op_type == "TensorScatter"
    past = update.inputs[0]
    assert past is not None and past.shape is not None and past.dtype is not None
    heads, width = past.shape[1], past.shape[3]
    assert isinstance(heads, int) and isinstance(width, int)
    return past.dtype, heads, width


def _cast(g: GraphBuilder, value: ir.Value, source: ir.DataType, target: ir.DataType) -> ir.Value:
    return value if source is target else g.op("Cast", value, to=int(target))
