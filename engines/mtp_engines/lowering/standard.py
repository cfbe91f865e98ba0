"""Lowering to standard operators alone, for backends that take neither plugins nor contrib kernels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import onnx_ir as ir
from onnx_ir.passes.common import IdentityEliminationPass, InlinePass

from mtp_engines.contracts import names
from mtp_engines.errors import BuildError
from mtp_engines.lowering.attention import attend_by_length
from mtp_engines.lowering.heads import CHECKSUM, IDS
from mtp_engines.lowering.unused import drop_unused
from mtp_plugins.gated_delta.body import body_with
from mtp_plugins.gated_delta.together import rows_together
from mtp_plugins.graph import DOMAIN, OPSET, GraphBuilder


def lower_standard(model: ir.Model, most_rows: int) -> ir.Model:
    """Replace every canonical node by standard operators; the model is changed and returned.

    They are the bodies of the nodes, with two exceptions. The rows of the delta rule are computed together, since
    TensorRT-RTX 1.7.1 finds no fused kernel for an attention behind a loop that is behind another attention. Attention
    is told the lengths of its caches in the place of a mask. Identities go, since a cache update must be a graph output
    itself.

    Args:
        most_rows: of a call.

    Raises:
        BuildError: a node has no body.
    """
    _unroll_delta(model.graph, most_rows)
    InlinePass()(model)
    IdentityEliminationPass()(model)
    attend_by_length(model.graph)
    drop_unused(model.graph)
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            raise BuildError(
                f"The graph {model.graph.name} has the node {node.domain}.{node.op_type}, which has no body of "
                "standard operators. Build the bundle again with this release."
            )
    model.functions.clear()
    model.graph.opset_imports.clear()
    model.graph.opset_imports[""] = OPSET
    return model


def _unroll_delta(graph: ir.Graph, most_rows: int) -> None:
    form = partial(rows_together, most_rows=most_rows)
    for node in list(graph):
        if node.domain == DOMAIN and node.op_type == "GatedDelta":
            builder = GraphBuilder("delta")
            with builder.scope(node.name or node.op_type):
                results = body_with(builder, [value for value in node.inputs if value is not None], form)
            ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, list(node.outputs), results)


def fix_axes(model: ir.Model, sizes: Mapping[str, int]) -> ir.Model:
    """Give symbolic axes of graph inputs and outputs a size; the model is changed and returned."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            value.shape = ir.Shape([_fixed(axis, sizes) for axis in value.shape])
    return model


def _fixed(axis: int | ir.SymbolicDim, sizes: Mapping[str, int]) -> int | str | None:
    if isinstance(axis, int):
        return axis
    return sizes.get(axis.value, axis.value) if axis.value is not None else None


def head_standard(model: ir.Model) -> ir.Model:
    """hidden_states float32[rows, hidden_size] -> ids int64[rows], and a checksum of each row.

    It is the end of a canonical backbone or draft head, in whatever precision that has. The first of equal logits
    wins: that is computed, since nothing promises it of a backend's own ArgMax. The checksum is the sum of a row's
    logits, not finite if any of them is not. Ids of a head with a vocabulary of its own are the target's.
    """
    outputs = {output.name: output for output in model.graph.outputs}
    logits = outputs[names.LOGITS]
    hidden = _rows_of(logits)
    graph = ir.convenience.extract(model.graph, [hidden], [logits])
    (rows,), (scores,) = graph.inputs, list(graph.outputs)
    assert scores.shape is not None
    vocab_size = scores.shape[2]
    assert isinstance(vocab_size, int)
    g = GraphBuilder("head")
    ids = _first_best(g, scores, vocab_size)
    if names.DRAFT_IDS in outputs:
        ids = g.op("Gather", _table(graph, outputs[names.DRAFT_IDS]), ids, axis=0)
    g.output(IDS, ids, "int64", ["rows"])
    g.output(CHECKSUM, g.op("ReduceSum", scores, g.constant([-1]), keepdims=0), "float32", ["rows"])
    graph.extend(g.nodes)
    graph.outputs.clear()
    graph.outputs.extend(g.outputs)
    scores.shape = ir.Shape(["rows", vocab_size])
    rows.name, rows.type = names.HIDDEN, ir.TensorType(ir.DataType.FLOAT)
    rows.shape = ir.Shape(["rows", _width(hidden)])
    graph.name = "head"
    graph.opset_imports.clear()
    graph.opset_imports[""] = OPSET
    return ir.Model(graph, ir_version=model.ir_version, producer_name=model.producer_name)


def _rows_of(logits: ir.Value) -> ir.Value:
    """The rows that are scored, before they are cast or multiplied."""
    node = logits.producer()
    while node is not None and node.op_type != "Slice":
        source = node.inputs[0]
        node = source.producer() if source is not None else None
    assert node is not None
    return node.outputs[0]


def _width(rows: ir.Value) -> int:
    """Width of the hidden state whose last rows these are."""
    node = rows.producer()
    assert node is not None and node.inputs[0] is not None and node.inputs[0].shape is not None
    width = node.inputs[0].shape[2]
    assert isinstance(width, int)
    return width


def _first_best(g: GraphBuilder, scores: ir.Value, vocab_size: int) -> ir.Value:
    """int64[rows], the lowest id whose score is the greatest; the last id where no score is a number."""
    best = g.op("Equal", scores, g.op("ReduceMax", scores, g.constant([-1]), keepdims=1))
    ids = g.op("Range", *(g.constant(number, "int32") for number in (0, vocab_size, 1)))
    found = g.op("Where", best, ids, g.constant(vocab_size - 1, "int32"))
    return g.op("Cast", g.op("ReduceMin", found, g.constant([-1]), keepdims=0), to=int(ir.DataType.INT64))


def _table(graph: ir.Graph, draft_ids: ir.Value) -> ir.Value:
    """The table from rows of the draft vocabulary to ids, added to another graph."""
    producer = draft_ids.producer()
    assert producer is not None and producer.op_type == "Gather"
    table = producer.inputs[0]
    assert table is not None and table.const_value is not None
    copy = ir.Value(name=table.name, type=table.type, shape=table.shape, const_value=table.const_value)
    graph.register_initializer(copy)
    return copy
