"""Gated delta layer: projections, short convolution, recurrence, gated norm."""

from __future__ import annotations

import onnx_ir as ir

from mtp_engines.contracts.model import GatedDeltaSpec
from mtp_exporter.layers.basic import linear, rms_norm, silu
from mtp_exporter.layers.weights import Weights
from mtp_plugins.graph import DOMAIN, GraphBuilder


def gated_delta(
    g: GraphBuilder,
    x: ir.Value,
    w: Weights,
    mixer: GatedDeltaSpec,
    epsilon: float,
    state: tuple[ir.Value, ir.Value],
) -> tuple[ir.Value, tuple[ir.Value, ir.Value], dict[str, ir.Value]]:
    """One gated delta layer.

    Args:
        x: float32[batch, rows, hidden_size], normed.
        state: float32[batch, kernel - 1, conv_width] and float32[batch, value_heads, key_dim, value_dim].

    Returns:
        float32[batch, rows, hidden_size], the state after the last row, and the replay factors of each row.
    """
    with g.scope("gated_delta"):
        past_conv, past_state = state
        raw = linear(g, x, w["query_key_value"])
        mixed, present_conv = g.op_multi(
            "CausalConvState", raw, w["conv"], past_conv, outputs=("output", "present"), domain=DOMAIN
        )
        widths = g.constant([mixer.key_width, mixer.key_width, mixer.value_width])
        query, key, value = g.op_multi("Split", mixed, widths, outputs=("query", "key", "value"), axis=-1)
        decay, beta = g.op_multi(
            "DeltaGate",
            linear(g, x, w["a"]),
            linear(g, x, w["b"]),
            w["dt_bias"],
            w["a_log"],
            outputs=("decay", "beta"),
            domain=DOMAIN,
        )
        output, present_state, unit_key = g.op_multi(
            "GatedDelta",
            query,
            key,
            value,
            decay,
            beta,
            past_state,
            outputs=("output", "present", "unit_key"),
            domain=DOMAIN,
            num_key_heads=mixer.key_heads,
            num_value_heads=mixer.value_heads,
        )
        factors = {"conv": raw, "key": unit_key, "value": value, "decay": decay, "beta": beta}
        normed = _gated_norm(g, output, linear(g, x, w["gate"]), w["norm"], mixer, epsilon)
        return linear(g, normed, w["output"]), (present_conv, present_state), factors


def _gated_norm(
    g: GraphBuilder, x: ir.Value, gate: ir.Value, gain: ir.Value, mixer: GatedDeltaSpec, epsilon: float
) -> ir.Value:
    """Norm per value head with a plain gain, then silu(gate): norm before gate."""
    heads = g.op("Reshape", x, g.constant([0, 0, mixer.value_heads, mixer.value_head_dim]))
    normed = g.op("Reshape", rms_norm(g, heads, gain, epsilon), g.constant([0, 0, mixer.value_width]))
    return g.op("Mul", normed, silu(g, gate))
