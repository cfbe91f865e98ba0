"""Lowering for ONNX Runtime on a CPU: contrib kernels in a form whose rows do not depend on their number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering import own_kernels, rules
from mtp_engines.lowering.cached_attention import cached_attention, latent_attention
from mtp_engines.lowering.caches import stored_width
from mtp_engines.lowering.convolution import causal_conv_state
from mtp_engines.lowering.experts import routed_experts
from mtp_engines.lowering.factors import pack_factors
from mtp_engines.lowering.own_kernels import KERNELS
from mtp_engines.lowering.products import FAST, Matrix, Products, matrix_of
from mtp_engines.lowering.unused import drop_unused
from mtp_plugins.graph import CONTRIB, DOMAIN, OPSET, GraphBuilder

Rule = Callable[[GraphBuilder, ir.Node], list[ir.Value]]

_RULES: dict[str, Rule] = {
    "BlockRows": rules.block_rows,
    "CausalConvState": causal_conv_state,
    "DeltaGate": rules.delta_gate,
    "GatedDelta": rules.gated_delta,
    "RotatedRows": rules.rotated_rows,
    "RoutedExperts": routed_experts,
}
_OWN_RULES: dict[str, Rule] = {
    "CachedAttention": own_kernels.cached_attention,
    "CausalConvState": own_kernels.causal_conv_state,
    "GatedDelta": own_kernels.gated_delta,
    "LatentAttention": own_kernels.latent_attention,
}
_ATTENTION = {"CachedAttention": cached_attention, "LatentAttention": latent_attention}
_MATRICES = ("BlockWeight", "RotatedWeight")
"""Read by the products themselves."""


def lower(model: ir.Model, accuracy: int = FAST, threads: int = 1, packed: PackedMatrices | None = None) -> ir.Model:
    """Replace every canonical node by kernels of ONNX Runtime; the model is changed and returned.

    Args:
        accuracy: of products with matrices of integers, `FAST` or `WIDE`.
        threads: that share the heads of an attention; they change its speed and no result.
        packed: memory for matrices of integers; with it the kernels of this project run, without it ONNX Runtime's.
    """
    graph, products = model.graph, Products(accuracy, packed)
    attention: dict[str, Rule] = {name: partial(rule, threads=threads) for name, rule in _ATTENTION.items()}
    replacements = _RULES | (attention if packed is None else _OWN_RULES)
    for node in list(graph):
        matrix = matrix_of(node) if node.op_type == "MatMul" else None
        if matrix is not None:
            _replace(graph, node, partial(_product, matrix=matrix, products=products))
        elif node.domain == DOMAIN and node.op_type not in _MATRICES:
            _replace(graph, node, replacements[node.op_type])
        elif node.op_type == "MatMul" and _is_headwise(node):
            _replace(graph, node, rules.headwise)
    own_kernels.merge_products(graph)
    if names.HIDDEN not in {output.name for output in graph.outputs}:
        own_kernels.forget_sizes(graph)
    _widen_caches(graph)
    pack_factors(graph)
    drop_unused(graph)
    graph.opset_imports.clear()
    graph.opset_imports.update({"": OPSET, CONTRIB: 1, KERNELS: 1})
    model.functions.clear()
    return own_kernels.keep(model, packed)


def _product(g: GraphBuilder, node: ir.Node, matrix: Matrix, products: Products) -> list[ir.Value]:
    x = node.inputs[0]
    assert x is not None
    return [products.add(g, x, matrix, axis=1)]


def _widen_caches(graph: ir.Graph) -> None:
    """Give caches the width that the backend stores."""
    for value in (*graph.inputs, *graph.outputs):
        if value.name is not None and names.is_cache(value.name):
            assert value.shape is not None
            *axes, width = value.shape
            assert isinstance(width, int)
            value.shape = ir.Shape([*axes, stored_width(width)])


def _is_headwise(node: ir.Node) -> bool:
    """Whether the second input is a weight with a matrix for each head, transposed or not."""
    weight = _transposed_weight(node) or node.inputs[1]
    return weight is not None and weight.is_initializer() and weight.shape is not None and len(weight.shape) == 3


def _transposed_weight(node: ir.Node) -> ir.Value | None:
    """The weight that is transposed for this product."""
    weight = node.inputs[1]
    producer = weight.producer() if weight is not None else None
    return producer.inputs[0] if producer is not None and producer.op_type == "Transpose" else None


def _replace(graph: ir.Graph, node: ir.Node, rule: Rule) -> None:
    builder = GraphBuilder(node.op_type)
    with builder.scope(node.name or node.op_type):
        results = rule(builder, node)
    name = node.outputs[-1].name
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], builder.nodes, list(node.outputs), results[: len(node.outputs)]
    )
    for extra in results[len(node.outputs) :]:
        # One cache that is key and value is written under two names; both are bound to one buffer.
        extra.name, extra.type, extra.shape = names.again(str(name)), results[-2].type, results[-2].shape
        graph.outputs.append(extra)
