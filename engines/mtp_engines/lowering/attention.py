"""Attention that is told how long each cache is, for backends that skip what lies behind."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder

KEY_VALUE_LENGTHS = "key_value_lengths"
"""int64[batch], rows of every cache that hold something once the new rows are in."""


def attend_by_length(graph: ir.Graph) -> None:
    """Replace the mask of every Attention over a cache by the length of that cache and causality.

    By the standard the last rows of a cache of `length` rows then stand against the rows of the query: query row i of
    M sees the keys up to length - M + i, which is what the mask said. Queries are scaled before, so that a parser has
    no reason to scale the cache.
    """
    nodes = [node for node in graph if node.op_type == "Attention"]
    if not nodes:
        return
    lengths, held = _lengths(graph, nodes[0]), _cache(nodes[0].inputs[1]).inputs[2]
    for node in nodes:
        query, key, value, _ = node.inputs
        assert query is not None
        assert _cache(key).inputs[2] is held, "the caches of a graph grow together"
        builder = GraphBuilder("attention")
        with builder.scope(node.name or node.op_type):
            width = _cache(key).inputs[0].shape[3]  # type: ignore[union-attr,index]
            assert isinstance(width, int)
            factor = builder.op("CastLike", builder.constant(width**-0.5, "float32"), query)
            scaled = builder.op("Mul", query, factor)
            output = builder.op("Attention", scaled, key, value, None, None, None, lengths, is_causal=1, scale=1.0)
        ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, list(node.outputs), [output])


def _lengths(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """The lengths under their name, in front of the first node that needs them."""
    query, key = node.inputs[0], node.inputs[1]
    assert query is not None
    builder = GraphBuilder("lengths")
    with builder.scope("lengths"):
        lengths = builder.op("Add", _cache(key).inputs[2], builder.op("Shape", query, start=2, end=3))
    lengths.name = KEY_VALUE_LENGTHS
    graph.insert_before(node, builder.nodes)
    return lengths


def _cache(key: ir.Value | None) -> ir.Node:
    """The node that puts new rows into the cache that a key is: cache, rows, how many rows it holds."""
    update = key.producer() if key is not None else None
    assert update is not None and update.op_type == "TensorScatter"
    return update
