"""Linear map, RMS norm and gated MLP."""

from __future__ import annotations

import onnx_ir as ir

from mtp_exporter.layers.weights import Weights
from mtp_plugins.graph import GraphBuilder


def linear(g: GraphBuilder, x: ir.Value, weight: ir.Value) -> ir.Value:
    """x @ W^T with W[out, in] as checkpoints store it."""
    return g.op("MatMul", x, g.op("Transpose", weight, perm=[1, 0]))


def rms_norm(g: GraphBuilder, x: ir.Value, gain: ir.Value, epsilon: float) -> ir.Value:
    """gain * x / sqrt(mean(x^2) + epsilon) over the last axis; gain is 1 + w for zero-centred weights."""
    return g.op("RMSNormalization", x, gain, axis=-1, epsilon=epsilon)


def silu(g: GraphBuilder, x: ir.Value) -> ir.Value:
    """x * sigmoid(x)."""
    return g.op("Mul", x, g.op("Sigmoid", x))


def gated_mlp(g: GraphBuilder, x: ir.Value, w: Weights) -> ir.Value:
    """down(silu(gate(x)) * up(x))."""
    with g.scope("mlp"):
        gate = silu(g, linear(g, x, w["gate"]))
        return linear(g, g.op("Mul", gate, linear(g, x, w["up"])), w["down"])
