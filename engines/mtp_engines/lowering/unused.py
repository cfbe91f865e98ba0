"""Removal of what no output of a graph needs."""

from __future__ import annotations

import onnx_ir as ir


def drop_unused(graph: ir.Graph) -> None:
    """Remove nodes without a used output, then initializers that no node reads."""
    for node in reversed(list(graph)):
        if all(not output.uses() and not output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
