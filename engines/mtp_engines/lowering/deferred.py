"""Staged rows: the inputs and outputs by which a call commits what the last one left.

A graph keeps its hidden states and gains, for each gated delta layer, two sets of rows: what the last call left
(`staged.*`) and what this one leaves (`next.*`), with the numbers of rows that are made permanent. What runs in
between is the backend's choice.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.errors import BundleError
from mtp_plugins.graph import GraphBuilder

INT32 = ir.TensorType(ir.DataType.INT32)
Rule = Callable[[GraphBuilder, ir.Node], list[ir.Value]]


class Deferred:
    """What a lowering adds to the inputs and outputs of one graph."""

    def __init__(self, graph: ir.Graph, staged_rows: int) -> None:
        """`staged_rows` is how many rows of a call can wait for a decision: the widest verify."""
        self._graph, self._staged_rows = graph, staged_rows
        self._inputs = {str(value.name): value for value in graph.inputs}

    def counts(self) -> tuple[ir.Value, ir.Value]:
        """int32[batch] each: accepted rows of the last call, and new rows that are kept at once."""
        return (
            self.input(names.ACCEPTED_ROWS, ir.DataType.INT32, ["batch"]),
            self.input(names.KEPT_ROWS, ir.DataType.INT32, ["batch"]),
        )

    def conv_rows(self, past: ir.Value) -> ir.Value:
        """The staged raw rows of the convolution whose state is `past`."""
        return self._staged(names.layer_of(str(past.name)), "conv", dimension(past, 2))

    def delta_rows(self, node: ir.Node) -> dict[str, ir.Value]:
        """The staged unit keys, values, decays and betas of a GatedDelta node."""
        past = node.inputs[5]
        assert past is not None
        layer = names.layer_of(str(past.name))
        heads, key_dim, value_dim = (dimension(past, axis) for axis in (1, 2, 3))
        widths = {
            "key": node.attributes["num_key_heads"].as_int() * key_dim,
            "value": heads * value_dim,
            "decay": heads,
            "beta": heads,
        }
        return {name: self._staged(layer, name, width) for name, width in widths.items()}

    def leave(self, staged: ir.Value, rows: ir.Value) -> None:
        """Make `rows` what the next call finds in the place of `staged`."""
        _, layer, name = str(staged.name).split(".")
        rows.name, rows.type, rows.shape = names.following(int(layer), name), staged.type, staged.shape
        self._graph.outputs.append(rows)

    def input(self, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
        """An input of the graph, which is added the first time."""
        if name not in self._inputs:
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
            self._inputs[name] = value
            self._graph.inputs.append(value)
        return self._inputs[name]

    def _staged(self, layer: int, name: str, width: int) -> ir.Value:
        for output in [value for value in self._graph.outputs if value.name == names.factor(layer, name)]:
            self._graph.outputs.remove(output)  # The staged rows take its place.
        return self.input(names.staged(layer, name), ir.DataType.FLOAT, ["batch", self._staged_rows, width])


def refuse_latent_attention(graph: ir.Graph) -> None:
    """Refuse what no GPU backend has a form for.

    Raises:
        BundleError: the model has latent attention.
    """
    if any(node.op_type == "LatentAttention" for node in graph):
        raise BundleError(
            "This model has latent attention, for which the GPU backends have no kernel yet. Run the bundle with "
            "--backend onnxruntime."
        )


def dimension(value: ir.Value, axis: int) -> int:
    """A size that the graph fixes."""
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size


def replace(graph: ir.Graph, node: ir.Node, rule: Rule) -> None:
    """Put what a rule makes in the place of a node; outputs without a result are dropped."""
    builder = GraphBuilder(node.op_type)
    # Casts of the node's inputs have its own name as their scope.
    with builder.scope(node.name or node.op_type), builder.scope("lowered"):
        results = rule(builder, node)
    # A factor that the canonical node gave is staged now.
    kept = list(node.outputs)[: len(results)]
    for dropped in list(node.outputs)[len(results) :]:
        if dropped.is_graph_output():
            graph.outputs.remove(dropped)
    ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, kept, results)


def transposed_weight(node: ir.Node) -> ir.Value | None:
    """The matrix whose transpose is multiplied with rows; None if the second input is something else."""
    producer = node.inputs[1].producer() if node.inputs[1] is not None else None
    if producer is None or producer.op_type != "Transpose":
        return None
    weight = producer.inputs[0]
    matrix = weight is not None and weight.is_initializer() and weight.shape is not None and len(weight.shape) == 2
    return weight if matrix else None
