"""Multi-head latent attention with its maps applied to query and output, so that the cache stays compressed."""

from __future__ import annotations

import onnx_ir as ir

from mtp_engines.contracts.model import LatentAttentionSpec
from mtp_exporter.layers.attention import Positions, rotate
from mtp_exporter.layers.basic import linear, rms_norm
from mtp_exporter.layers.weights import Weights
from mtp_plugins.graph import DOMAIN, GraphBuilder


def latent_attention(
    g: GraphBuilder,
    x: ir.Value,
    w: Weights,
    mixer: LatentAttentionSpec,
    positions: Positions,
    past: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """One latent attention layer.

    Args:
        x: float32[batch, rows, hidden_size], normed.
        past: float32[batch, 1, capacity, row_width].

    Returns:
        float32[batch, rows, hidden_size], and the present cache.
    """
    with g.scope("latent_attention"):
        rows = _rows(g, x, w, mixer, positions)
        attended, present = g.op_multi(
            "LatentAttention",
            _query(g, x, w, mixer, positions),
            rows,
            past,
            positions.past_length,
            outputs=("output", "present"),
            domain=DOMAIN,
            num_heads=mixer.num_heads,
        )
        split = g.op("Reshape", attended, g.constant([0, 0, mixer.num_heads, mixer.row_width]))
        latents = g.op("Slice", split, g.constant([0]), g.constant([mixer.latent_dim]), g.constant([3]))
        by_head = g.op("Transpose", latents, perm=[0, 2, 1, 3])
        values = g.op("MatMul", by_head, g.op("Transpose", w["value_map"], perm=[0, 2, 1]))
        flat = g.op("Transpose", values, perm=[0, 2, 1, 3])
        output = linear(g, g.op("Reshape", flat, g.constant([0, 0, mixer.num_heads * mixer.value_dim])), w["output"])
        return _biased(g, output, w, "output", mixer), present


def _rows(g: GraphBuilder, x: ir.Value, w: Weights, mixer: LatentAttentionSpec, positions: Positions) -> ir.Value:
    """New cache rows float32[batch, rows, row_width]: normed latent, then the rotated key that all heads share."""
    compressed = _biased(g, linear(g, x, w["compress"]), w, "compress", mixer)
    widths = g.constant([mixer.latent_dim, mixer.rotary.dim])
    latent, key = g.op_multi("Split", compressed, widths, outputs=("latent", "key"), axis=-1)
    normed = rms_norm(g, latent, w["latent_norm"], mixer.norm_epsilon)
    return g.op("Concat", normed, rotate(g, key, 1, mixer.rotary.dim, mixer.rotary, positions), axis=-1)


def _query(g: GraphBuilder, x: ir.Value, w: Weights, mixer: LatentAttentionSpec, positions: Positions) -> ir.Value:
    """float32[batch, rows, num_heads * row_width]: each head's query as it meets the cache rows."""
    if mixer.query_rank is not None:
        compressed = _biased(g, linear(g, x, w["query_compress"]), w, "query_compress", mixer)
        x = rms_norm(g, compressed, w["query_latent_norm"], mixer.norm_epsilon)
    dims = [mixer.key_dim, mixer.rotary.dim]
    heads = g.op("Reshape", linear(g, x, w["query"]), g.constant([0, 0, mixer.num_heads, sum(dims)]))
    plain, rotary = g.op_multi("Split", heads, g.constant(dims), outputs=("plain", "rotary"), axis=-1)
    mapped = g.op("MatMul", g.op("Transpose", plain, perm=[0, 2, 1, 3]), w["key_map"])
    latent = g.op("Transpose", mapped, perm=[0, 2, 1, 3])
    flat = g.op("Reshape", rotary, g.constant([0, 0, mixer.num_heads * mixer.rotary.dim]))
    rotated = rotate(g, flat, mixer.num_heads, mixer.rotary.dim, mixer.rotary, positions)
    placed = g.op("Reshape", rotated, g.constant([0, 0, mixer.num_heads, mixer.rotary.dim]))
    # The operator divides by the root of a cache row's width; the model's own factor is for the head's.
    factor = g.constant(mixer.scale * mixer.row_width**0.5, "float32")
    query = g.op("Mul", g.op("Concat", latent, placed, axis=-1), factor)
    return g.op("Reshape", query, g.constant([0, 0, mixer.num_heads * mixer.row_width]))


def _biased(g: GraphBuilder, x: ir.Value, w: Weights, role: str, mixer: LatentAttentionSpec) -> ir.Value:
    return g.op("Add", x, w[f"{role}_bias"]) if mixer.bias else x
