"""The equations of a Qwen3.5 decoder layer in float64, with the deliberate faults of the controls.

A layer maps rows plus the state before them to rows plus the state after them. It never changes a
state in place, so an older state can be kept and returned to. `broken` names at most one fault;
each is looked up where its convention stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes
import numpy as np

from tests.oracles.float64_checkpoint import Array, TextConfig, Weights, subset

# Fixed by the family, and not rms_norm_eps.
L2NORM_EPS = 1e-6


class FullState(NamedTuple):
    """Rows a full-attention layer has seen: float64[positions, num_key_value_heads, head_dim]."""

    kind: str
    key: Array
    value: Array


class LinearState(NamedTuple):
    """What a linear-attention layer remembers.

    conv: float64[kernel - 1, channels], the newest rows before convolution and SiLU.
    recurrent: float64[num_value_heads, key_head_dim, value_head_dim].
    """

    kind: str
    conv: Array
    recurrent: Array


LayerState = FullState | LinearState


@dataclass(frozen=True)
class LayerRun:
    """Every stage of one layer over T rows, each float64[T, hidden_size], and the state after."""

    attention_input: Array
    attention: Array
    first_residual: Array
    mlp_input: Array
    mlp: Array
    second_residual: Array
    state: LayerState


def empty_state(kind: str, config: TextConfig) -> LayerState:
    """The state before the first row."""
    if kind == "full_attention":
        rows = np.zeros((0, config.num_key_value_heads, config.head_dim))
        return FullState("full", rows, rows)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    heads = (config.linear_num_value_heads, config.linear_key_head_dim)
    return LinearState(
        "linear",
        np.zeros((config.linear_conv_kernel_dim - 1, 2 * keys + values)),
        np.zeros((*heads, config.linear_value_head_dim)),
    )


def run_layer(
    rows: Array,
    weights: Weights,
    config: TextConfig,
    state: LayerState,
    start: int,
    broken: str | None,
) -> LayerRun:
    """One decoder layer over float64[T, hidden_size] whose first row has position `start`."""
    eps = config.rms_norm_eps
    attention_input = zero_centred_norm(rows, weights["input_layernorm.weight"], eps, broken)
    if isinstance(state, FullState):
        part = subset(weights, "self_attn.")
        attention, state = _full_attention(attention_input, part, config, state, start, broken)
    else:
        part = subset(weights, "linear_attn.")
        attention, state = _delta_net(attention_input, part, config, state, broken)
    first = rows + attention
    mlp_input = zero_centred_norm(first, weights["post_attention_layernorm.weight"], eps, broken)
    mlp = _mlp(mlp_input, subset(weights, "mlp."))
    return LayerRun(attention_input, attention, first, mlp_input, mlp, first + mlp, state)


def zero_centred_norm(rows: Array, weight: Array, eps: float, broken: str | None) -> Array:
    """RMS norm over the last axis with gain 1 + weight: the file stores the distance from 1."""
    gain = weight if broken == "plain_gain" else 1.0 + weight
    return rms(rows, eps) * gain


def rms(rows: Array, eps: float) -> Array:
    """Rows over the root of their mean square."""
    return rows / np.sqrt((rows * rows).mean(-1, keepdims=True) + eps)


def sigmoid(x: Array) -> Array:
    """Logistic function; by tanh, because exp(-x) overflows for very negative x."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def _mlp(rows: Array, weights: Weights) -> Array:
    gate = rows @ weights["gate_proj.weight"].T
    up = rows @ weights["up_proj.weight"].T
    return (silu(gate) * up) @ weights["down_proj.weight"].T


def _full_attention(
    rows: Array,
    weights: Weights,
    config: TextConfig,
    state: FullState,
    start: int,
    broken: str | None,
) -> tuple[Array, FullState]:
    """Gated causal attention of T rows over the rows before them and themselves."""
    count, dim = len(rows), config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    query, gate = _query_and_gate(rows @ weights["q_proj.weight"].T, heads, dim, broken)
    key = (rows @ weights["k_proj.weight"].T).reshape(count, kv_heads, dim)
    value = (rows @ weights["v_proj.weight"].T).reshape(count, kv_heads, dim)
    eps = config.rms_norm_eps
    positions = np.arange(start, start + count)
    query = _rope(zero_centred_norm(query, weights["q_norm.weight"], eps, broken), positions, config, broken)
    key = _rope(zero_centred_norm(key, weights["k_norm.weight"], eps, broken), positions, config, broken)
    state = FullState("full", np.concatenate([state.key, key]), np.concatenate([state.value, value]))
    mixed = _attend(query, state, broken).reshape(count, heads * dim)
    return (mixed * sigmoid(gate)) @ weights["o_proj.weight"].T, state


def _query_and_gate(projected: Array, heads: int, dim: int, broken: str | None) -> tuple[Array, Array]:
    """Split float64[T, 2 * heads * dim] into query [T, heads, dim] and gate [T, heads * dim]."""
    count = len(projected)
    if broken == "flat_q_gate":
        query, gate = np.split(projected, 2, axis=1)
        return query.reshape(count, heads, dim), gate
    # The halves alternate head by head: [query 0, gate 0, query 1, gate 1, ...].
    pairs = projected.reshape(count, heads, 2, dim)
    return pairs[:, :, 0], pairs[:, :, 1].reshape(count, heads * dim)


def _rope(rows: Array, positions: Array, config: TextConfig, broken: str | None) -> Array:
    """Rotate the leading part of every head; pair i is (i, i + half) within that part."""
    dim = config.head_dim
    rotated = dim if broken == "rope_full" else int(dim * config.partial_rotary_factor)
    half = rotated // 2
    frequencies = config.rope_theta ** (-2.0 * np.arange(half) / rotated)
    angle = positions[:, None, None] * frequencies
    cos, sin = np.cos(angle), np.sin(angle)
    low, high, rest = rows[..., :half], rows[..., half:rotated], rows[..., rotated:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)


def _attend(query: Array, state: FullState, broken: str | None) -> Array:
    """Causal softmax attention; the newest query row lines up with the newest key row."""
    count, heads, dim = query.shape
    # Query heads j*r .. j*r + r - 1 read key head j.
    repeats = heads // state.key.shape[1]
    key, value = np.repeat(state.key, repeats, axis=1), np.repeat(state.value, repeats, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, key)
    if broken != "unscaled_scores":
        scores = scores / np.sqrt(dim)
    total = len(key)
    future = np.arange(total)[None, :] > np.arange(total - count, total)[:, None]
    scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, value)


def _delta_net(
    rows: Array, weights: Weights, config: TextConfig, state: LinearState, broken: str | None
) -> tuple[Array, LinearState]:
    """Gated delta net of T rows, one row at a time."""
    count = len(rows)
    raw = rows @ weights["in_proj_qkv.weight"].T
    convolved, conv = _convolve(raw, weights["conv1d.weight"][:, 0], state.conv, broken)
    query, key, value = _delta_heads(convolved, config, broken)
    beta = sigmoid(rows @ weights["in_proj_b.weight"].T)
    step = np.logaddexp(0.0, rows @ weights["in_proj_a.weight"].T + weights["dt_bias"])
    decay = np.exp(-np.exp(weights["A_log"]) * step)
    if broken == "no_decay":
        decay = np.ones_like(decay)
    recurrent, mixed = state.recurrent, np.empty_like(value)
    for t in range(count):
        recurrent, mixed[t] = _delta_step(recurrent, query[t], key[t], value[t], beta[t], decay[t], broken)
    gate = (rows @ weights["in_proj_z.weight"].T).reshape(value.shape)
    # The only norm of the family with a plain gain.
    gain = weights["norm.weight"] + (1.0 if broken == "linear_norm_zero_centred" else 0.0)
    mixed = rms(mixed, config.rms_norm_eps) * gain * silu(gate)
    out = mixed.reshape(count, -1) @ weights["out_proj.weight"].T
    return out, LinearState("linear", conv, recurrent)


def _convolve(raw: Array, kernel: Array, before: Array, broken: str | None) -> tuple[Array, Array]:
    """Causal depthwise convolution and SiLU of float64[T, channels], and the conv state after.

    kernel: float64[channels, taps]; the last tap belongs to the row itself.
    """
    count, taps = len(raw), kernel.shape[1]
    context = np.concatenate([before, raw])
    out = silu(sum(context[i : i + count] * kernel[:, i] for i in range(taps)))
    if broken == "conv_state_post_silu":
        context = np.concatenate([before, out])
    return out, context[len(context) - (taps - 1) :]


def _delta_heads(convolved: Array, config: TextConfig, broken: str | None) -> tuple[Array, Array, Array]:
    """Query and key [T, num_value_heads, key_head_dim], value [T, num_value_heads, value_dim]."""
    count, dim = len(convolved), config.linear_key_head_dim
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    query, key, value = np.split(convolved, [key_heads * dim, 2 * key_heads * dim], axis=1)
    query = _l2norm(query.reshape(count, key_heads, dim), broken)
    key = _l2norm(key.reshape(count, key_heads, dim), broken)
    if broken != "q_unscaled":
        query = query / np.sqrt(dim)
    repeats = value_heads // key_heads
    if broken == "repeat_not_interleave":
        query, key = np.tile(query, (1, repeats, 1)), np.tile(key, (1, repeats, 1))
    else:
        query, key = np.repeat(query, repeats, axis=1), np.repeat(key, repeats, axis=1)
    return query, key, value.reshape(count, value_heads, config.linear_value_head_dim)


def _l2norm(rows: Array, broken: str | None) -> Array:
    squares = (rows * rows).sum(-1, keepdims=True)
    if broken == "l2norm_eps_outside":
        return rows / (np.sqrt(squares) + L2NORM_EPS)
    return rows / np.sqrt(squares + L2NORM_EPS)


def _delta_step(
    recurrent: Array,
    query: Array,
    key: Array,
    value: Array,
    beta: Array,
    decay: Array,
    broken: str | None,
) -> tuple[Array, Array]:
    """One row: decay, correct towards the value, then read the updated state."""
    decayed = recurrent * decay[:, None, None]
    error = beta[:, None] * (value - np.einsum("hkv,hk->hv", decayed, key))
    updated = decayed + np.einsum("hk,hv->hkv", key, error)
    if broken == "state_bf16":
        updated = updated.astype(ml_dtypes.bfloat16).astype(np.float64)
    source = decayed if broken == "read_before_update" else updated
    return updated, np.einsum("hkv,hk->hv", source, query)
