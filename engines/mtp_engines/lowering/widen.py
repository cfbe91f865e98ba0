"""Matrices of integers as whole float32 ones again, for backends without kernels for them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.lowering.products import block_columns
from mtp_engines.lowering.unused import drop_unused
from mtp_plugins.block_weight.reference import block_weight, turning
from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.rotated_weight.reference import rotated_weight, rotation

Floats = npt.NDArray[np.float32]
_MATRICES = ("BlockWeight", "RotatedWeight")
_ROWS = ("BlockRows", "RotatedRows")
_BLOCKS = ("BlockWeight", "BlockRows")


def widen_matrices(model: ir.Model) -> ir.Model:
    """Put the matrix in the place of its integers, as values that are made when they are read.

    The bundle then computes with the weights that it holds, in whatever precision the backend has; its memory is
    that of whole matrices. The model is changed and returned.
    """
    graph = model.graph
    made: dict[str, ir.Value] = {}
    for node in list(graph):
        if node.domain != DOMAIN or node.op_type not in _MATRICES + _ROWS:
            continue
        weight = _weight(graph, made, node)
        if node.op_type in _MATRICES:
            ir.convenience.replace_all_uses_with(node.outputs[0], weight)
            graph.remove(node, safe=True)
        else:
            builder = GraphBuilder("rows")
            with builder.scope(str(node.name)):
                rows = builder.op("Gather", weight, node.inputs[-1], axis=0)
            ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, node.outputs, [rows])
    drop_unused(graph)
    for identifier in [key for key in model.functions if key[1] in _MATRICES + _ROWS]:
        del model.functions[identifier]
    return model


def _weight(graph: ir.Graph, made: dict[str, ir.Value], node: ir.Node) -> ir.Value:
    """The matrix of a node as an initializer; nodes over the same integers share it."""
    stored, scales = node.inputs[0], node.inputs[1]
    assert stored is not None and scales is not None
    turned = stored.producer()
    if turned is not None:  # A matrix that is gathered from too lies by rows, and is transposed for products.
        stored = turned.inputs[0]
        assert stored is not None
    assert stored.const_value is not None and scales.const_value is not None
    name = str(stored.name).rsplit(".", 1)[0]
    if name not in made:
        by_rows = turned is not None or node.op_type in _ROWS
        if node.op_type in _BLOCKS:
            read, sizes = _reading_blocks(stored.const_value, scales.const_value, block_columns(node))
        else:
            read, sizes = _reading_rotated(stored.const_value, scales.const_value, by_rows)
        shape = ir.Shape(sizes)
        tensor = ir.LazyTensor(lambda: ir.Tensor(read(), name=name), ir.DataType.FLOAT, shape, name=name)
        made[name] = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape, const_value=tensor)
        graph.register_initializer(made[name])
    return made[name]


def _reading_blocks(
    stored: ir.TensorProtocol, scales: ir.TensorProtocol, columns: int
) -> tuple[Callable[[], Floats], list[int]]:
    """How the floats are made, and how many rows and columns there are."""
    return lambda: block_weight(stored.numpy(), scales.numpy(), turning(), columns), [stored.shape.numpy()[0], columns]


def _reading_rotated(
    stored: ir.TensorProtocol, scales: ir.TensorProtocol, by_rows: bool
) -> tuple[Callable[[], Floats], list[int]]:
    """The same for rotated integers, by rows or by columns."""
    first, second = stored.shape.numpy()[:2]
    rows, columns = (first, second) if by_rows else (second, first)

    def read() -> Floats:
        values = stored.numpy()
        return rotated_weight(values.T if by_rows else values, scales.numpy(), rotation(columns))

    return read, [rows, columns]
