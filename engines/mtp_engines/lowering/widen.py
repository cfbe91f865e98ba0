"""Weights in blocks as whole float32 matrices again, for backends without kernels for blocks."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.block_weight.reference import block_weight
from mtp_plugins.graph import DOMAIN, GraphBuilder


def widen_blocks(model: ir.Model) -> ir.Model:
    """Put the matrix in the place of its blocks, as values that are made when they are read.

    The bundle then computes with the weights that it holds, in whatever precision the backend has; its memory is
    that of whole matrices. The model is changed and returned.
    """
    graph = model.graph
    made: dict[str, ir.Value] = {}
    for node in list(graph):
        if node.domain != DOMAIN or node.op_type not in ("BlockWeight", "BlockRows"):
            continue
        weight = _weight(graph, made, node)
        if node.op_type == "BlockWeight":
            ir.convenience.replace_all_uses_with(node.outputs[0], weight)
            graph.remove(node, safe=True)
        else:
            builder = GraphBuilder("rows")
            with builder.scope(str(node.name)):
                rows = builder.op("Gather", weight, node.inputs[2], axis=0)
            ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, node.outputs, [rows])
    for name in [name for name, value in graph.initializers.items() if not value.uses()]:
        del graph.initializers[name]
    for identifier in [key for key in model.functions if key[1] in ("BlockWeight", "BlockRows")]:
        del model.functions[identifier]
    return model


def _weight(graph: ir.Graph, made: dict[str, ir.Value], node: ir.Node) -> ir.Value:
    """The matrix of a node as an initializer; nodes over the same blocks share it."""
    blocks, scales = node.inputs[0], node.inputs[1]
    assert blocks is not None and scales is not None
    assert blocks.const_value is not None and scales.const_value is not None and scales.shape is not None
    name = str(blocks.name).removesuffix(".blocks")
    if name not in made:
        bits = node.attributes["bits"].as_int()
        sources = (blocks.const_value, scales.const_value)

        def read() -> ir.TensorProtocol:
            return ir.Tensor(block_weight(sources[0].numpy(), sources[1].numpy(), bits), name=name)

        rows, count = (int(str(size)) for size in scales.shape)
        shape = ir.Shape([rows, 32 * count])
        tensor = ir.LazyTensor(read, ir.DataType.FLOAT, shape, name=name)
        made[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape, const_value=tensor)
        graph.register_initializer(made[name])
    return made[name]
