"""Mixture of experts: routing, routed experts, shared expert."""

from __future__ import annotations

import onnx_ir as ir

from mtp_engines.contracts.model import MoeSpec
from mtp_exporter.layers.basic import gated_mlp, linear
from mtp_exporter.layers.weights import Weights
from mtp_plugins.graph import DOMAIN, GraphBuilder

# As the reference implementations add to the sum of the weights, so that it is never zero.
SUM_EPSILON = 1e-20


def mixture_of_experts(g: GraphBuilder, x: ir.Value, w: Weights, moe: MoeSpec, name: str) -> ir.Value:
    """float32[batch, rows, hidden_size] -> the same shape; see `MoeSpec` for the formula.

    The chosen experts get `name`, so that tools can follow a choice between nearly equal ones.
    """
    with g.scope("moe"):
        ids, weights = _route(g, x, w, moe)
        g.label(name, ids, "int64", ["batch", "rows", moe.top_k])
        experts = w.below("experts.")
        output = g.op("RoutedExperts", x, ids, weights, experts["gate_up"], experts["down"], domain=DOMAIN)
        if moe.shared_intermediate_size:
            shared = gated_mlp(g, x, w.below("shared."))
            if moe.shared_gate:
                shared = g.op("Mul", shared, g.op("Sigmoid", linear(g, x, w["shared_gate"])))
            output = g.op("Add", output, shared)
        return output


def _route(g: GraphBuilder, x: ir.Value, w: Weights, moe: MoeSpec) -> tuple[ir.Value, ir.Value]:
    """Chosen experts int64[batch, rows, top_k] and their weights float32 of the same shape."""
    logits = linear(g, x, w["router"])
    scores = g.op("Softmax", logits, axis=-1) if moe.scoring == "softmax" else g.op("Sigmoid", logits)
    ranked = g.op("Add", scores, w["correction_bias"]) if moe.correction_bias else scores
    if moe.groups > 1:
        ranked = _best_groups(g, ranked, moe)
    _, ids = g.op_multi("TopK", ranked, g.constant([moe.top_k]), outputs=("values", "ids"), axis=-1)
    weights = g.op("GatherElements", scores, ids, axis=-1)
    if moe.normalise:
        total = g.op("ReduceSum", weights, g.constant([-1]), keepdims=1)
        weights = g.op("Div", weights, g.op("Add", total, g.constant(SUM_EPSILON, "float32")))
    if moe.scale != 1.0:
        weights = g.op("Mul", weights, g.constant(moe.scale, "float32"))
    return ids, weights


def _best_groups(g: GraphBuilder, ranked: ir.Value, moe: MoeSpec) -> ir.Value:
    """The scores with every expert outside the best groups at minus infinity."""
    each = moe.experts // moe.groups
    grouped = g.op("Reshape", ranked, g.constant([0, 0, moe.groups, each]))
    best, _ = g.op_multi("TopK", grouped, g.constant([min(2, each)]), outputs=("values", "ids"), axis=-1)
    strength = g.op("ReduceSum", best, g.constant([-1]), keepdims=0)
    _, chosen = g.op_multi("TopK", strength, g.constant([moe.top_groups]), outputs=("values", "ids"), axis=-1)
    none = g.op("Expand", g.constant(float("-inf"), "float32"), g.op("Shape", strength))
    zeros = g.op("Expand", g.constant(0.0, "float32"), g.op("Shape", chosen))
    penalty = g.op("ScatterElements", none, chosen, zeros, axis=-1)
    allowed = g.op("Add", grouped, g.op("Unsqueeze", penalty, g.constant([-1])))
    return g.op("Reshape", allowed, g.constant([0, 0, moe.experts]))
