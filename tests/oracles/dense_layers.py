"""The equations of a dense decoder layer and of the heads on top, in float64, with named faults.

`broken` names at most one fault; each is looked up where its convention stands.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.oracles.dense_checkpoint import DenseConfig, Head
from tests.oracles.float64_checkpoint import Array, Weights, subset
from tests.oracles.float64_layers import FullState, LayerRun, rms, silu


class HeadRun(NamedTuple):
    """One run of a head.

    chain: the rows that a chained step takes for hidden rows. output: those that the output head
    reads. stages: every intermediate by name. state: after the last row.
    """

    chain: Array
    output: Array
    stages: dict[str, Array]
    state: FullState


def norm(rows: Array, weight: Array, eps: float, broken: str | None) -> Array:
    """RMS norm over the last axis with gain `weight`."""
    return rms(rows, eps) * (1.0 + weight if broken == "one_plus_gain" else weight)


def linear(rows: Array, weights: Weights, name: str, broken: str | None) -> Array:
    """rows @ W^T, and the bias if there is one."""
    bias = weights.get(f"{name}.bias")
    out = rows @ weights[f"{name}.weight"].T
    return out if bias is None or broken == "no_bias" else out + bias


def run_dense_layer(
    rows: Array,
    weights: Weights,
    config: DenseConfig,
    state: FullState,
    start: int,
    broken: str | None,
    attention_input: Array | None = None,
) -> LayerRun:
    """One layer over float64[T, hidden_size] whose first row has position `start`.

    attention_input: what attention reads instead of the normed rows.
    """
    eps = config.rms_norm_eps
    if attention_input is None:
        attention_input = norm(rows, weights["input_layernorm.weight"], eps, broken)
    attention, state = attend(attention_input, subset(weights, "self_attn."), config, state, start, broken)
    first = rows + attention
    mlp_input = norm(first, weights["post_attention_layernorm.weight"], eps, broken)
    gated = silu(linear(mlp_input, weights, "mlp.gate_proj", broken)) * linear(
        mlp_input, weights, "mlp.up_proj", broken
    )
    mlp = linear(gated, weights, "mlp.down_proj", broken)
    return LayerRun(attention_input, attention, first, mlp_input, mlp, first + mlp, state)


def attend(
    rows: Array, weights: Weights, config: DenseConfig, state: FullState, start: int, broken: str | None
) -> tuple[Array, FullState]:
    """Causal attention of T rows over the rows before them and themselves."""
    count, dim = len(rows), config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    query = linear(rows, weights, "q_proj", broken).reshape(count, heads, dim)
    key = linear(rows, weights, "k_proj", broken).reshape(count, kv_heads, dim)
    value = linear(rows, weights, "v_proj", broken).reshape(count, kv_heads, dim)
    if "q_norm.weight" in weights and broken != "query_norms_ignored":
        query = norm(query, weights["q_norm.weight"], config.rms_norm_eps, broken)
        key = norm(key, weights["k_norm.weight"], config.rms_norm_eps, broken)
    positions = np.arange(start, start + count)
    query, key = rotate(query, positions, config, broken), rotate(key, positions, config, broken)
    state = FullState("full", np.concatenate([state.key, key]), np.concatenate([state.value, value]))
    # Consecutive query heads share a key head.
    keys, values = (np.repeat(rows, heads // kv_heads, axis=1) for rows in (state.key, state.value))
    scores = np.einsum("qhd,khd->hqk", query, keys)
    if broken != "unscaled_scores":
        scores = scores / np.sqrt(dim)
    # The newest query row lines up with the newest key row.
    future = np.arange(len(keys))[None, :] > np.arange(len(keys) - count, len(keys))[:, None]
    shares = np.exp(np.where(future, -np.inf, scores) - scores.max(-1, keepdims=True))
    shares = shares / shares.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", shares, values)
    return linear(mixed.reshape(count, heads * dim), weights, "o_proj", broken), state


def rotate(rows: Array, positions: Array, config: DenseConfig, broken: str | None) -> Array:
    """Rotate every head; pair i is (i, i + head_dim / 2)."""
    if broken == "rope_none":
        return rows
    rope = config.rope
    frequencies, scale = rope.frequencies, rope.scale
    if broken == "rope_scaling_ignored":
        frequencies, scale = rope.unscaled, 1.0
    if broken == "rope_partial":
        # A pair that does not turn; another family turns only a quarter of them.
        frequencies = np.where(np.arange(len(frequencies)) < len(frequencies) // 4, frequencies, 0.0)
    angle = positions[:, None, None] * frequencies
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    if broken == "rope_interleaved":
        low, high = rows[..., 0::2], rows[..., 1::2]
        return np.stack([low * cos - high * sin, high * cos + low * sin], axis=-1).reshape(rows.shape)
    low, high = np.split(rows, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def run_mimo(
    head: Head, depth: int, embedding: Array, hidden: Array, state: FullState, start: int, broken: str | None
) -> HeadRun:
    """A MiMo depth: a Qwen2 layer over the projected pair."""
    weights, eps = head.depths[depth], head.config.rms_norm_eps
    embedding_norm = norm(embedding, weights["token_layernorm.weight"], eps, broken)
    hidden_norm = norm(hidden, weights["hidden_layernorm.weight"], eps, broken)
    # Hidden first, which no other family does; both halves are equally wide.
    concatenation = _join([hidden_norm, embedding_norm], broken)
    projection = concatenation @ weights["input_proj.weight"].T
    run = run_dense_layer(projection, weights, head.config, state, start, broken)
    output = norm(run.second_residual, weights["final_layernorm.weight"], eps, broken)
    stages = {
        "embedding_norm": embedding_norm,
        "hidden_norm": hidden_norm,
        "concatenation": concatenation,
        "projection": projection,
        **_stages(run),
        "output": output,
    }
    return HeadRun(run.second_residual if broken == "chain_pre_norm" else output, output, stages, run.state)


def run_eagle(
    head: Head, embedding: Array, hidden: Array, state: FullState, start: int, broken: str | None, final_norm: Array
) -> HeadRun:
    """EAGLE-1: a Llama layer without its input norm, and no norm anywhere else before the logits.

    final_norm: the target's, which only a fault applies.
    """
    weights, eps = head.depths[0], head.config.rms_norm_eps
    concatenation = _join([embedding, hidden], broken)
    projection = linear(concatenation, weights, "fc", broken)
    attention_input = rms(projection, eps) if broken == "input_norm_added" else projection
    run = run_dense_layer(projection, weights, head.config, state, start, broken, attention_input)
    output = run.second_residual
    if broken == "final_norm_added":
        output = norm(output, final_norm, eps, broken)
    stages = {"concatenation": concatenation, "projection": projection, **_stages(run), "output": output}
    return HeadRun(run.second_residual, output, stages, run.state)


def run_eagle3(
    head: Head, embedding: Array, hidden: Array, state: FullState, start: int, broken: str | None
) -> HeadRun:
    """EAGLE-3: attention over [embedding, hidden], the hidden row alone in the residual stream.

    hidden: the target's taps side by side, which `fc` joins, or the head's own rows as they are.
    """
    weights, eps = head.depths[0], head.config.rms_norm_eps
    stages, rows = {}, hidden
    if hidden.shape[1] == weights["fc.weight"].shape[1]:
        rows = stages["projection"] = linear(hidden, weights, "fc", broken)
    elif broken == "fc_on_chain":
        rows = linear(np.tile(hidden, (1, len(head.taps))), weights, "fc", broken)
    embedding_norm = norm(embedding, weights["input_layernorm.weight"], eps, broken)
    hidden_norm = norm(rows, weights["hidden_norm.weight"], eps, broken)
    concatenation = _join([embedding_norm, hidden_norm], broken)
    normed = head.norm_before_residual != (broken == "residual_normed")
    residual = hidden_norm if normed else rows
    run = run_dense_layer(residual, weights, head.config, state, start, broken, concatenation)
    output = norm(run.second_residual, weights["norm.weight"], eps, broken)
    stages |= {
        "embedding_norm": embedding_norm,
        "hidden_norm": hidden_norm,
        "concatenation": concatenation,
        **_stages(run),
        "output": output,
    }
    return HeadRun(output if broken == "chain_post_norm" else run.second_residual, output, stages, run.state)


def _join(halves: list[Array], broken: str | None) -> Array:
    return np.concatenate(halves[::-1] if broken == "swap_concat" else halves, axis=1)


def _stages(run: LayerRun) -> dict[str, Array]:
    return {name: value for name, value in vars(run).items() if name != "state"}
