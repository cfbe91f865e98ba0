"""Lowering for a GPU: caches in pages, states that are committed by the next call.

A backend gives every new operator a kernel, or runs its body.
"""

from __future__ import annotations

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.lowering.deferred import (
    INT32,
    Deferred,
    Rule,
    dimension,
    refuse_latent_attention,
    replace,
    transposed_weight,
)
from mtp_engines.lowering.unused import drop_unused
from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.registry import OPERATORS


def lower_paged(model: ir.Model, staged_rows: int, *, skinny: bool = False) -> ir.Model:
    """Replace caches by pages and kept states by deferred ones; the model is changed and returned.

    Args:
        model: a canonical graph without its vocabulary head, in the precision it will run in.
        staged_rows: how many rows of a call can wait for a decision: the widest verify.
        skinny: matrix products by `SkinnyProduct`, whose rows do not depend on their number, instead of
            the backend's own.

    Raises:
        BundleError: a layer has no form for a GPU yet.
    """
    graph = model.graph
    refuse_latent_attention(graph)
    paged = _Paged(graph, staged_rows)
    for node in list(graph):
        if node.domain == DOMAIN and node.op_type in paged.rules:
            replace(graph, node, paged.rules[node.op_type])
    if skinny:
        skinny_products(model)
    drop_unused(graph)
    used = sorted({node.op_type for node in graph if node.domain == DOMAIN})
    model.functions.clear()
    model.functions.update({(DOMAIN, name, ""): OPERATORS[name].function() for name in used})
    return model


def skinny_products(model: ir.Model, *, flat: bool = False) -> ir.Model:
    """Put `SkinnyProduct` in the place of every product with a stored matrix; the model is changed and returned.

    Args:
        flat: the rows have no axis for the batch.
    """
    for node in list(model.graph):
        if node.op_type == "MatMul" and transposed_weight(node) is not None:
            replace(model.graph, node, _flat_skinny_product if flat else _skinny_product)
    drop_unused(model.graph)
    return model


class _Paged:
    """The rules, and the inputs and outputs that they add."""

    def __init__(self, graph: ir.Graph, staged_rows: int) -> None:
        self._deferred = Deferred(graph, staged_rows)
        self.rules: dict[str, Rule] = {
            "CachedAttention": self.attention,
            "CausalConvState": self.conv,
            "GatedDelta": self.delta,
        }

    def attention(self, g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
        """The new rows into the pages, then attention over them."""
        query, key, value, past_key, past_value, past_length = node.inputs
        assert past_key is not None and past_value is not None and past_length is not None
        heads, dim = node.attributes["num_kv_heads"].as_int(), dimension(past_key, 3)
        past_length.type = INT32
        table = self._deferred.input(names.BLOCK_TABLE, ir.DataType.INT32, ["batch", "max_pages"])
        for past, output in ((past_key, node.outputs[1]), (past_value, node.outputs[2])):
            past.shape = output.shape = ir.Shape(["pages", "page_size", heads, dim])
        pages = g.op_multi(
            "PagedKvAppend",
            key,
            value,
            past_key,
            past_value,
            table,
            past_length,
            outputs=("key_pages", "value_pages"),
            domain=DOMAIN,
        )
        attended = g.op("PagedAttention", query, *pages, table, past_length, domain=DOMAIN, scale=dim**-0.5)
        return [attended, *pages]

    def conv(self, g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
        """The convolution, whose staged rows are raw rows."""
        x, weight, past = node.inputs
        assert past is not None
        staged = self._deferred.conv_rows(past)
        output, present, following = g.op_multi(
            "DeferredConv",
            x,
            weight,
            past,
            staged,
            *self._deferred.counts(),
            outputs=("output", "present", "next"),
            domain=DOMAIN,
        )
        self._deferred.leave(staged, following)
        return [output, present]

    def delta(self, g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
        """The recurrence, whose staged rows are unit keys, values, decays and betas."""
        staged = self._deferred.delta_rows(node)
        output, present, *following = g.op_multi(
            "DeferredDelta",
            *node.inputs,
            *staged.values(),
            *self._deferred.counts(),
            outputs=("output", "present", *(f"next_{name}" for name in staged)),
            domain=DOMAIN,
        )
        for buffer, rows in zip(staged.values(), following, strict=True):
            self._deferred.leave(buffer, rows)
        return [output, present]


def _skinny_product(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    # Its sums leave it as they are; a product of the library would round them to the type of the weight.
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    weight = transposed_weight(node)
    return [g.op("SkinnyProduct", node.inputs[0], weight, domain=DOMAIN, to=int(ir.DataType.FLOAT))]


def _flat_skinny_product(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    first, weight = g.constant([0]), transposed_weight(node)
    rows = g.op("Unsqueeze", node.inputs[0], first)
    product = g.op("SkinnyProduct", rows, weight, domain=DOMAIN, to=int(ir.DataType.FLOAT))
    return [g.op("Squeeze", product, first)]
