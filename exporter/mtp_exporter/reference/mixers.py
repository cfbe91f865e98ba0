"""Mixers of the NumPy forward, each over one whole sequence from position 0."""

from __future__ import annotations

import numpy as np

from mtp_engines.contracts.model import AttentionSpec, GatedDeltaSpec, LatentAttentionSpec, Mixer, RotarySpec
from mtp_exporter.layers.rotary import rotary_tables
from mtp_exporter.reading.source import Source
from mtp_plugins.arrays import Array
from mtp_plugins.cached_attention.reference import cached_attention
from mtp_plugins.causal_conv_state.reference import causal_conv_state, silu
from mtp_plugins.delta_gate.reference import delta_gate
from mtp_plugins.gated_delta.reference import gated_delta


def mix(mixer: Mixer, weights: Source, x: Array, epsilon: float) -> Array:
    """The mixer of a layer over normed rows float[rows, width]."""
    if isinstance(mixer, AttentionSpec):
        return attention_mixer(mixer, weights, x, epsilon)
    if isinstance(mixer, LatentAttentionSpec):
        return latent_mixer(mixer, weights, x)
    return delta_mixer(mixer, weights, x, epsilon)


def attention_mixer(mixer: AttentionSpec, weights: Source, x: Array, epsilon: float) -> Array:
    """Full attention; query and gate, if there is one, are interleaved per head."""
    rows = x.shape[0]

    def heads(role: str, count: int) -> Array:
        projected = x @ weights(role).T + (weights(f"{role}_bias") if mixer.bias else 0)
        return np.asarray(projected.reshape(rows, count, -1))

    gate: Array | None = None
    if mixer.output_gate:
        query, gate = np.split(heads("query_gate", mixer.num_heads), 2, axis=-1)
    else:
        query = heads("query", mixer.num_heads)
    key, value = heads("key", mixer.num_kv_heads), heads("value", mixer.num_kv_heads)
    if mixer.qk_norm:
        query = rms_norm(query, weights("query_norm"), epsilon)
        key = rms_norm(key, weights("key_norm"), epsilon)
    mixed = cached_attention(rotate(query, mixer.rotary), rotate(key, mixer.rotary), value, 0)
    if gate is not None:
        mixed = mixed / (1 + np.exp(-gate))
    return np.asarray(mixed.reshape(rows, mixer.query_width) @ weights("output").T)


def latent_mixer(mixer: LatentAttentionSpec, weights: Source, x: Array) -> Array:
    """Latent attention with keys and values of every head written out, unlike the graph, which never does."""
    rows, heads = x.shape[0], mixer.num_heads

    def project(role: str, inputs: Array) -> Array:
        biased = mixer.bias and role != "query"
        return np.asarray(inputs @ weights(role).T + (weights(f"{role}_bias") if biased else 0))

    inputs = x
    if mixer.query_rank is not None:
        inputs = rms_norm(project("query_compress", x), weights("query_latent_norm"), mixer.norm_epsilon)
    query = project("query", inputs).reshape(rows, heads, -1)
    compressed = project("compress", x)
    latent = rms_norm(compressed[:, : mixer.latent_dim], weights("latent_norm"), mixer.norm_epsilon)
    shared_key = rotate(compressed[:, None, mixer.latent_dim :], mixer.rotary)
    keys = np.einsum("hdr,tr->thd", weights("key_map"), latent)
    values = np.einsum("hdr,tr->thd", weights("value_map"), latent)
    key = np.concatenate([keys, shared_key.repeat(heads, axis=1)], axis=-1)
    rotated = rotate(query[:, :, mixer.key_dim :], mixer.rotary)
    query = np.concatenate([query[:, :, : mixer.key_dim], rotated], axis=-1)
    # The operator divides scores by the root of the head's width; the model has a factor of its own.
    mixed = cached_attention(query * (mixer.scale * query.shape[-1] ** 0.5), key, values, 0)
    return project("output", mixed.reshape(rows, -1))


def delta_mixer(mixer: GatedDeltaSpec, weights: Source, x: Array, epsilon: float) -> Array:
    """Gated delta layer from an empty state."""
    rows = x.shape[0]
    raw = x @ weights("query_key_value").T
    empty = np.zeros((mixer.conv_kernel - 1, mixer.conv_width), raw.dtype)
    mixed, _ = causal_conv_state(raw, weights("conv"), empty)
    query, key, value = np.split(mixed, [mixer.key_width, 2 * mixer.key_width], axis=-1)
    decay, beta = delta_gate(x @ weights("a").T, x @ weights("b").T, weights("dt_bias"), weights("a_log"))
    output, _ = gated_delta(
        query.reshape(rows, mixer.key_heads, mixer.key_head_dim),
        key.reshape(rows, mixer.key_heads, mixer.key_head_dim),
        value.reshape(rows, mixer.value_heads, mixer.value_head_dim),
        decay,
        beta,
        np.zeros((mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim), raw.dtype),
    )
    normed = rms_norm(output, weights("norm"), epsilon).reshape(rows, mixer.value_width)
    return np.asarray((normed * silu(x @ weights("gate").T)) @ weights("output").T)


def rms_norm(x: Array, gain: Array, epsilon: float) -> Array:
    """gain * x / sqrt(mean(x^2) + epsilon) over the last axis."""
    return np.asarray(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * gain)


def rotate(x: Array, rotary: RotarySpec) -> Array:
    """Rotary positions 0 .. rows - 1 on the first dimensions of float[rows, heads, head_dim]."""
    cosine, sine = (table[:, None].astype(x.dtype) for table in rotary_tables(rotary, x.shape[0]))
    turned, rest = np.split(x, [rotary.dim], axis=-1)
    if rotary.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = np.split(turned, 2, axis=-1)
    pair = [first * cosine - second * sine, second * cosine + first * sine]
    mixed = np.stack(pair, axis=-1).reshape(turned.shape) if rotary.interleaved else np.concatenate(pair, axis=-1)
    return np.concatenate([mixed, rest], axis=-1)
