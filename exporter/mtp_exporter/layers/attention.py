"""Full attention over a cache, with the parts that its spec asks for."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mtp_engines.contracts.model import AttentionSpec, RotarySpec
from mtp_exporter.layers.basic import linear, rms_norm
from mtp_exporter.layers.rotary import rotary_tables
from mtp_exporter.layers.weights import Weights
from mtp_plugins.graph import DOMAIN, GraphBuilder


@dataclass(frozen=True)
class Positions:
    """position_ids int64[batch, rows], past_length int64[batch], and the rotary tables float32[positions, dim / 2]."""

    position_ids: ir.Value
    past_length: ir.Value
    cosine: ir.Value
    sine: ir.Value


def rotary_constants(g: GraphBuilder, rotary: RotarySpec, positions: int) -> tuple[ir.Value, ir.Value]:
    """The rotary tables, computed in float64 and stored as float32.

    Tables inside the graph, since ONNX Runtime's Cos and Sin round differently for other row counts.
    """
    cosine, sine = rotary_tables(rotary, positions)
    return g.constant(cosine, "float32"), g.constant(sine, "float32")


def attention(
    g: GraphBuilder,
    x: ir.Value,
    w: Weights,
    mixer: AttentionSpec,
    epsilon: float,
    positions: Positions,
    cache: tuple[ir.Value, ir.Value],
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """One attention layer.

    Args:
        x: float32[batch, rows, hidden_size], normed.
        cache: past key and value, float32[batch, num_kv_heads, capacity, head_dim].

    Returns:
        float32[batch, rows, hidden_size], and the present key and value.
    """
    with g.scope("attention"):
        query, gate = _query_and_gate(g, x, w, mixer)
        output, present_key, present_value = g.op_multi(
            "CachedAttention",
            _placed(g, query, "query", w, mixer, mixer.num_heads, epsilon, positions),
            _placed(g, _project(g, x, w, "key", mixer), "key", w, mixer, mixer.num_kv_heads, epsilon, positions),
            _project(g, x, w, "value", mixer),
            *cache,
            positions.past_length,
            outputs=("output", "present_key", "present_value"),
            domain=DOMAIN,
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
        )
        if gate is not None:
            flat_gate = g.op("Reshape", gate, g.constant([0, 0, mixer.query_width]))
            output = g.op("Mul", output, g.op("Sigmoid", flat_gate))
        return linear(g, output, w["output"]), present_key, present_value


def _query_and_gate(g: GraphBuilder, x: ir.Value, w: Weights, mixer: AttentionSpec) -> tuple[ir.Value, ir.Value | None]:
    if not mixer.output_gate:
        return _project(g, x, w, "query", mixer), None
    dim = mixer.head_dim
    # Per head: dim values of the query, then dim values of its gate.
    pairs = g.op("Reshape", linear(g, x, w["query_gate"]), g.constant([0, 0, mixer.num_heads, 2 * dim]))
    query, gate = g.op_multi("Split", pairs, g.constant([dim, dim]), outputs=("query", "gate"), axis=-1)
    return query, gate


def _project(g: GraphBuilder, x: ir.Value, w: Weights, role: str, mixer: AttentionSpec) -> ir.Value:
    projected = linear(g, x, w[role])
    return g.op("Add", projected, w[f"{role}_bias"]) if mixer.bias else projected


def _placed(
    g: GraphBuilder,
    x: ir.Value,
    role: str,
    w: Weights,
    mixer: AttentionSpec,
    heads: int,
    epsilon: float,
    positions: Positions,
) -> ir.Value:
    """Norm each head where the model does, then rotate."""
    if mixer.qk_norm:
        split = g.op("Reshape", x, g.constant([0, 0, heads, mixer.head_dim]))
        x = rms_norm(g, split, w[f"{role}_norm"], epsilon)
    flat = g.op("Reshape", x, g.constant([0, 0, heads * mixer.head_dim]))
    return rotate(g, flat, heads, mixer.head_dim, mixer.rotary, positions)


def rotate(
    g: GraphBuilder, x: ir.Value, heads: int, head_dim: int, rotary: RotarySpec, positions: Positions
) -> ir.Value:
    """Rotate the first dimensions of each head of float32[batch, rows, heads * head_dim]."""
    return g.op(
        "RotaryEmbedding",
        x,
        positions.cosine,
        positions.sine,
        positions.position_ids,
        num_heads=heads,
        interleaved=int(rotary.interleaved),
        rotary_embedding_dim=rotary.dim if rotary.dim < head_dim else 0,
    )
