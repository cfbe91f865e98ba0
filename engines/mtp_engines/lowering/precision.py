"""Weights, their products and the caches in a half type; everything else stays float32."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.errors import BuildError
from mtp_plugins.graph import DOMAIN, GraphBuilder

Precision = Literal["fp32", "bf16", "fp16"]
WEIGHT_TYPES: dict[Precision, ir.DataType] = {
    "fp32": ir.DataType.FLOAT,
    "bf16": ir.DataType.BFLOAT16,
    "fp16": ir.DataType.FLOAT16,
}
_NARROWED = {"CachedAttention": (0, 1, 2), "LatentAttention": (0, 1), "RoutedExperts": (0, 2)}
"""Inputs of a canonical operator that are cast; its caches or matrices are of the half type already."""
_EXPERT_MATRICES = (3, 4)


def to_precision(model: ir.Model, precision: Precision) -> ir.Model:
    """Give a canonical graph weights and caches of one type, with every cast written out.

    Cast are: the matrix of a product and its other operand, embeddings, matrices of experts, caches, and what
    attention and experts consume. Products are cast back, so the residual stream, norms, gates, delta states,
    convolutions and replay factors stay float32. Weights are read when they are written, one at a time. The
    model is changed and returned.
    """
    if precision != "fp32":
        _Narrowing(model.graph, WEIGHT_TYPES[precision]).run()
    return model


class _Narrowing:
    """One pass over one graph."""

    def __init__(self, graph: ir.Graph, half: ir.DataType) -> None:
        self._graph, self._half = graph, half
        self._g = GraphBuilder("precision")
        self._narrow: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        for value in (*self._graph.inputs, *self._graph.outputs):
            if value.name is not None and names.is_cache(value.name):
                value.type = ir.TensorType(self._half)
        for node in list(self._graph):
            if node.op_type == "MatMul":
                self._product(node)
            elif node.op_type == "Gather" and _is_float_weight(node.inputs[0]):
                self._weight(node.inputs[0])
                self._widen_output(node)
            elif node.domain == DOMAIN and node.op_type in _NARROWED:
                if node.op_type == "RoutedExperts":
                    for index in _EXPERT_MATRICES:
                        self._weight(node.inputs[index])
                self._narrow_inputs(node, _NARROWED[node.op_type])
                self._widen_output(node)

    def _product(self, node: ir.Node) -> None:
        matrix = node.inputs[1]
        assert matrix is not None
        transpose = matrix.producer()
        stored = transpose.inputs[0] if transpose is not None and transpose.op_type == "Transpose" else matrix
        if not _is_float_weight(stored):
            return
        self._weight(stored)
        if stored is not matrix and matrix.type is not None:
            matrix.type = ir.TensorType(self._half)
        self._narrow_inputs(node, (0,))
        self._widen_output(node)

    def _weight(self, value: ir.Value | None) -> None:
        """Change the type of a weight in place, so that whatever shares it still does."""
        assert value is not None and value.const_value is not None
        if value.dtype is not self._half:
            value.const_value = cast_lazily(value.const_value, self._half)
            value.type = ir.TensorType(self._half)

    def _narrow_inputs(self, node: ir.Node, indices: tuple[int, ...]) -> None:
        for index in indices:
            wide = node.inputs[index]
            assert wide is not None
            if wide not in self._narrow:
                self._narrow[wide] = self._cast(wide, self._half, node, before=True)
            node.replace_input_with(index, self._narrow[wide])

    def _widen_output(self, node: ir.Node) -> None:
        """The first output becomes a cast that has its name; whoever read it reads the cast."""
        half = node.outputs[0]
        users, label = list(half.uses()), (half.name, half.type, half.shape)
        wide = self._cast(half, ir.DataType.FLOAT, node, before=False)
        for user in users:
            user.node.replace_input_with(user.idx, wide)
        for index, output in enumerate(self._graph.outputs):
            if output is half:
                self._graph.outputs[index] = wide
        half.name, half.type, half.shape = f"{half.name}.half", ir.TensorType(self._half), None
        wide.name, wide.type, wide.shape = label

    def _cast(self, value: ir.Value, dtype: ir.DataType, node: ir.Node, *, before: bool) -> ir.Value:
        with self._g.scope(node.name or node.op_type):
            result = self._g.op("Cast", value, to=int(dtype))
        cast = self._g.nodes.pop()
        if before:
            self._graph.insert_before(node, cast)
        else:
            self._graph.insert_after(node, cast)
        return result


def _is_float_weight(value: ir.Value | None) -> bool:
    """Whether a value is a stored matrix; a table of ids is gathered from too."""
    return value is not None and value.is_initializer() and value.dtype is not None and value.dtype.is_floating_point()


def cast_lazily(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.LazyTensor:
    """A tensor that reads and casts another one whenever it is asked for its values.

    Raises, when it is read:
        BuildError: a finite value is not finite in the new type.
    """

    def read() -> ir.TensorProtocol:
        values = _fresh(tensor).numpy()
        with np.errstate(over="ignore"):
            cast = values.astype(dtype.numpy())
        if dtype is ir.DataType.FLOAT16 and np.isinf(cast).any() and np.isfinite(values).all():
            worst = float(np.abs(values).max())
            raise BuildError(
                f"The weight {tensor.name} has values up to {worst:.3g}, float16 ends at 65504. Build with "
                "--precision bf16."
            )
        return ir.Tensor(cast, dtype=dtype, name=tensor.name)

    return ir.LazyTensor(read, dtype, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _fresh(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The same bytes under a mapping of their own, which is let go with them."""
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        base_dir=tensor.base_dir,
    )
