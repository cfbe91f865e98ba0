"""A NumPy forward straight from the checkpoint: what the built graphs are checked against.

It shares with the graphs only the family's description. The weights are read from the checkpoint's own
files, one layer at a time, and the operators are the NumPy references of the plugins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from mtp_engines.contracts.model import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelSpec
from mtp_plugins.arrays import Array
from mtp_plugins.cached_attention.reference import cached_attention
from mtp_plugins.causal_conv_state.reference import causal_conv_state, silu
from mtp_plugins.delta_gate.reference import delta_gate
from mtp_plugins.gated_delta.reference import gated_delta

Read = Callable[[str], Array]
"""Role -> tensor, norm gains already 1 + w."""


@dataclass(frozen=True)
class Stage:
    """One value of the forward: the residual stream after a layer, or an output, float[rows, width]."""

    name: str
    value: Array


def target_stages(spec: ModelSpec, read: Read, embeddings: Array) -> Iterator[Stage]:
    """Residual stream before and after every layer, then the hidden state after the final norm.

    Args:
        embeddings: float[rows, hidden_size], positions 0 .. rows - 1 of one sequence.
    """
    x = embeddings
    yield Stage("residual.0", x)
    for index, layer in enumerate(spec.layers):
        x = decoder_layer(spec, layer, lambda role, i=index: read(f"layers.{i}.{role}"), x)  # type: ignore[misc]
        yield Stage(f"residual.{index + 1}", x)
    yield Stage("hidden_states", rms_norm(x, read("final_norm"), spec.norm_epsilon))


def head_output(spec: ModelSpec, read: Read, embeddings: Array, hidden: Array) -> Array:
    """The MTP head over a whole sequence: row p takes the embedding of token p + 1 and hidden state p.

    Args:
        embeddings, hidden: float[rows, hidden_size].

    Returns:
        float[rows, hidden_size] after the head's last norm.
    """
    assert spec.mtp is not None
    parts = [
        rms_norm(embeddings, read("mtp.embedding_norm"), spec.norm_epsilon),
        rms_norm(hidden, read("mtp.hidden_norm"), spec.norm_epsilon),
    ]
    if spec.mtp.concat == "hidden_first":
        parts.reverse()
    x: Array = np.concatenate(parts, axis=-1) @ read("mtp.projection").T
    x = decoder_layer(spec, spec.mtp.layer, lambda role: read(f"mtp.layer.{role}"), x)
    return rms_norm(x, read("mtp.output_norm"), spec.norm_epsilon)


def decoder_layer(spec: ModelSpec, layer: LayerSpec, read: Read, x: Array) -> Array:
    """x + mixer(norm(x)), then x + mlp(norm(x)), for one whole sequence from position 0."""
    normed = rms_norm(x, read("input_norm"), spec.norm_epsilon)
    if isinstance(layer.mixer, AttentionSpec):
        x = x + attention_mixer(layer.mixer, read, normed, spec.norm_epsilon)
    else:
        x = x + delta_mixer(layer.mixer, read, normed, spec.norm_epsilon)
    normed = rms_norm(x, read("post_norm"), spec.norm_epsilon)
    gate = silu(normed @ read("mlp.gate").T)
    return np.asarray(x + (gate * (normed @ read("mlp.up").T)) @ read("mlp.down").T)


def attention_mixer(mixer: AttentionSpec, read: Read, x: Array, epsilon: float) -> Array:
    """Full attention; query and gate, if there is one, are interleaved per head."""
    rows = x.shape[0]

    def heads(role: str, count: int) -> Array:
        projected = x @ read(f"mixer.{role}").T + (read(f"mixer.{role}_bias") if mixer.bias else 0)
        return np.asarray(projected.reshape(rows, count, -1))

    gate: Array | None = None
    if mixer.output_gate:
        query, gate = np.split(heads("query_gate", mixer.num_heads), 2, axis=-1)
    else:
        query = heads("query", mixer.num_heads)
    key, value = heads("key", mixer.num_kv_heads), heads("value", mixer.num_kv_heads)
    if mixer.qk_norm:
        query = rms_norm(query, read("mixer.query_norm"), epsilon)
        key = rms_norm(key, read("mixer.key_norm"), epsilon)
    mixed = cached_attention(rotate(query, mixer), rotate(key, mixer), value, 0)
    if gate is not None:
        mixed = mixed / (1 + np.exp(-gate))
    return np.asarray(mixed.reshape(rows, mixer.query_width) @ read("mixer.output").T)


def delta_mixer(mixer: GatedDeltaSpec, read: Read, x: Array, epsilon: float) -> Array:
    """Gated delta layer from an empty state."""
    rows = x.shape[0]
    raw = x @ read("mixer.query_key_value").T
    empty = np.zeros((mixer.conv_kernel - 1, mixer.conv_width), raw.dtype)
    mixed, _ = causal_conv_state(raw, read("mixer.conv"), empty)
    query, key, value = np.split(mixed, [mixer.key_width, 2 * mixer.key_width], axis=-1)
    decay, beta = delta_gate(x @ read("mixer.a").T, x @ read("mixer.b").T, read("mixer.dt_bias"), read("mixer.a_log"))
    output, _ = gated_delta(
        query.reshape(rows, mixer.key_heads, mixer.key_head_dim),
        key.reshape(rows, mixer.key_heads, mixer.key_head_dim),
        value.reshape(rows, mixer.value_heads, mixer.value_head_dim),
        decay,
        beta,
        np.zeros((mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim), raw.dtype),
    )
    normed = rms_norm(output, read("mixer.norm"), epsilon).reshape(rows, mixer.value_width)
    return np.asarray((normed * silu(x @ read("mixer.gate").T)) @ read("mixer.output").T)


def rms_norm(x: Array, gain: Array, epsilon: float) -> Array:
    """gain * x / sqrt(mean(x^2) + epsilon) over the last axis."""
    return np.asarray(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + epsilon) * gain)


def rotate(x: Array, mixer: AttentionSpec) -> Array:
    """Rotary positions 0 .. rows - 1 on the first rotary_dim dimensions, first half against second half."""
    half = mixer.rotary_dim // 2
    angles = np.arange(x.shape[0])[:, None] * mixer.rope_theta ** (-np.arange(half) / half)
    cosine, sine = np.cos(angles)[:, None].astype(x.dtype), np.sin(angles)[:, None].astype(x.dtype)
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
