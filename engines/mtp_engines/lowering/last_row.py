"""A draft head that finishes one row of each sequence: of the others, only the cache is of use later."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder

LAST_ROW = "last_row"
"""int64[batch, 1, 1]: the row of each sequence whose output is wanted."""
_ATTENTION = ("CachedAttention", "LatentAttention")


def only_last_row(model: ir.Model) -> ir.Model:
    """Let what comes behind the attention of a canonical head see one row; the model is changed and returned.

    Outputs become [batch, 1, width]. A row that is only caught up with then costs its key and value and what stands
    before them, and neither the output matrix of the attention nor the MLP.
    """
    graph = model.graph
    (attention,) = (node for node in graph if node.op_type in _ATTENTION)
    behind = _reached_from([attention.outputs[0]])
    rows = _reached_from(graph.inputs)
    g = GraphBuilder("last_row")
    index = g.input(LAST_ROW, "int64", ["batch", 1, 1])
    chosen: dict[ir.Value, ir.Value] = {}
    for node in graph:
        if node not in behind:
            continue
        for place, value in enumerate(node.inputs):
            if value is None or value.producer() in behind or not (value.is_graph_input() or value.producer() in rows):
                continue
            if value not in chosen:
                chosen[value] = g.op("GatherND", value, index, batch_dims=1)
            node.replace_input_with(place, chosen[value])
    graph.insert_after(attention, g.nodes)
    graph.inputs.append(index)
    graph.sort()
    for output in graph.outputs:
        if output.producer() in behind and output.shape is not None:
            output.shape = ir.Shape(["batch", 1, *output.shape[2:]])
    return model


def _reached_from(values: Iterable[ir.Value]) -> set[ir.Node]:
    """The nodes that depend on some of the values."""
    waiting, found = list(values), set[ir.Node]()
    while waiting:
        for node in waiting.pop().consumers():
            if node not in found:
                found.add(node)
                waiting.extend(node.outputs)
    return found
