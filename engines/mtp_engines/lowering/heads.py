"""The vocabulary head as a graph of its own, so that target and draft share one packed copy of it."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering.own_kernels import KERNELS, keep, packed_choice
from mtp_engines.lowering.products import Matrix, Products, matrix_of
from mtp_engines.lowering.unused import drop_unused
from mtp_plugins.graph import CONTRIB, GraphBuilder

IDS = "ids"
CHECKSUM = "checksum"


def without_head(model: ir.Model) -> ir.Model:
    """Drop the logits from a backbone or head graph, and everything only they need."""
    graph = model.graph
    for output in [output for output in graph.outputs if output.name in (names.LOGITS, names.DRAFT_IDS)]:
        graph.outputs.remove(output)
    drop_unused(graph)
    for value in [value for value in graph.inputs if not value.uses()]:
        graph.inputs.remove(value)
    return model


class HeadModels(NamedTuple):
    """The graphs of a vocabulary head, hidden float32[rows, hidden_size] -> ids int64[rows] and a checksum of each row.

    The checksum is not finite if any logit of the row is not. The ids of a head with a vocabulary of its own are the
    target's. `score` gives the logits too, float32[rows, vocab_size]; where ONNX Runtime multiplies, it is the only
    graph, since each packs its matrix for itself.
    """

    choose: ir.Model
    score: ir.Model


def head_models(model: ir.Model, packed: PackedMatrices | None = None) -> HeadModels:
    """The vocabulary head of a canonical graph; `packed` as `lower` takes it."""
    found = {output.name: output for output in model.graph.outputs}
    logits, draft_ids = found[names.LOGITS], found.get(names.DRAFT_IDS)
    producer = logits.producer()
    assert producer is not None
    matrix = matrix_of(producer)
    assert matrix is not None
    vocab_size, hidden_size = matrix.shape

    g = GraphBuilder("head")
    hidden = g.input(names.HIDDEN, "float32", ["rows", hidden_size])
    products = Products(packed=packed)
    scores = products.add(g, hidden, matrix if products.packs(matrix) else own_copy(g, matrix), axis=0)
    # ArgMax takes the first of equal values, so ties go to the lowest id everywhere.
    _give_ids(g, g.op("ArgMax", scores, axis=-1, keepdims=0), draft_ids)
    g.output(CHECKSUM, g.op("ReduceSum", scores, g.constant([-1]), keepdims=0), "float32", ["rows"])
    g.output(names.LOGITS, scores, "float32", ["rows", vocab_size])
    score = keep(g.model(domains=[CONTRIB, KERNELS]), packed)

    product = scores.producer()
    if product is None or product.op_type != "PackedProduct":
        return HeadModels(score, score)
    g = GraphBuilder("choice")
    ids, checksum = packed_choice(g, g.input(names.HIDDEN, "float32", ["rows", hidden_size]), product)
    _give_ids(g, ids, draft_ids)
    g.output(CHECKSUM, checksum, "float32", ["rows"])
    return HeadModels(keep(g.model(domains=[KERNELS]), packed), score)


def _give_ids(g: GraphBuilder, ids: ir.Value, draft_ids: ir.Value | None) -> None:
    if draft_ids is not None:
        table = _table(draft_ids)
        ids = g.op("Gather", g.initializer(str(table.name), table), ids, axis=0)
    g.output(IDS, ids, "int64", ["rows"])


def own_copy(g: GraphBuilder, matrix: Matrix) -> Matrix:
    """The matrix as initializers of another graph."""
    tensors = []
    for value in matrix.tensors:
        assert isinstance(value.const_value, ir.ExternalTensor)
        tensors.append(g.initializer(str(value.name), value.const_value))
    return matrix.with_tensors(tensors)


def _table(draft_ids: ir.Value) -> ir.ExternalTensor:
    """The table from rows of the draft vocabulary to ids, which the canonical graph gathers from."""
    producer = draft_ids.producer()
    assert producer is not None and producer.op_type == "Gather"
    table = producer.inputs[0]
    assert table is not None and isinstance(table.const_value, ir.ExternalTensor)
    return table.const_value
