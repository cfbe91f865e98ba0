"""The decoder layers of four mixture-of-experts families in float64, with their deliberate faults.

The Qwen families mix tokens as the dense Qwen3.5 does, so their attention and delta nets are the
dense oracle's. Latent and grouped attention, with plain norms, stand here. A layer maps rows and
the state before them to rows and the state after them, and never changes a state in place.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.oracles.float64_checkpoint import Array, TextConfig, Weights, subset
from tests.oracles.float64_layers import (
    FullState,
    LayerRun,
    LayerState,
    empty_state,
    rms,
    run_layer,
    zero_centred_norm,
)
from tests.oracles.moe_families_checkpoint import FamilyConfig, Grouped, Latent
from tests.oracles.moe_families_rope import grouped_rope, latent_rope, latent_scale, rotate
from tests.oracles.moe_families_routing import feed_forward

# The norms inside latent attention have their own, whatever rms_norm_eps is.
LATENT_NORM_EPS = 1e-6


def first_state(kind: str, config: FamilyConfig) -> LayerState:
    """The state of one layer before the first row.

    Latent attention keeps one row a position: as `key` the latent after its norm, float64[positions,
    1, kv_lora_rank], and as `value` the rotated key part that all heads share, float64[positions, 1,
    qk_rope_head_dim], its pairs where the checkpoint has them.
    """
    sizes = config.attention
    if isinstance(sizes, TextConfig):
        return empty_state(kind, sizes)
    if isinstance(sizes, Latent):
        return FullState("full", np.zeros((0, 1, sizes.rank)), np.zeros((0, 1, sizes.rotated)))
    rows = np.zeros((0, sizes.kv_heads, sizes.head_dim))
    return FullState("full", rows, rows)


def run_family_layer(
    rows: Array, weights: Weights, config: FamilyConfig, state: LayerState, start: int, broken: str | None
) -> LayerRun:
    """One decoder layer over float64[T, hidden_size] whose first row has position `start`."""
    if isinstance(config.attention, TextConfig):
        nothing = _silent_mlp(rows.shape[1])
        mixed = run_layer(rows, {**weights, **nothing}, config.attention, state, start, broken)
    else:
        mixed = _plain_layer(rows, weights, config, state, start, broken)
    mlp = feed_forward(mixed.mlp_input, subset(weights, "mlp."), config.routing, broken)
    return replace(mixed, mlp=mlp, second_residual=mixed.first_residual + mlp)


def norm(rows: Array, weight: Array, config: FamilyConfig, broken: str | None) -> Array:
    """The family's norm outside the mixers."""
    if config.zero_centred:
        return zero_centred_norm(rows, weight, config.rms_norm_eps, broken)
    return _plain_norm(rows, weight, config.rms_norm_eps, broken)


def delta_net_weights(weights: Weights, sizes: TextConfig, broken: str | None) -> Weights:
    """A layer's tensors with packed delta net inputs taken apart into four matrices.

    Rows are packed by key head: its query, its key, then the values and gates of its value heads.
    """
    prefix = "linear_attn."
    if f"{prefix}in_proj_qkvz.weight" not in weights:
        return weights
    keys, repeats = sizes.linear_num_key_heads, sizes.linear_num_value_heads // sizes.linear_num_key_heads
    dim, values = sizes.linear_key_head_dim, repeats * sizes.linear_value_head_dim
    query, key, value, gate = _unpacked(
        weights[f"{prefix}in_proj_qkvz.weight"], (dim, dim, values, values), keys, broken == "qkvz_flat"
    )
    beta, decay = _unpacked(weights[f"{prefix}in_proj_ba.weight"], (repeats, repeats), keys, broken == "ba_flat")
    apart = {
        f"{prefix}in_proj_qkv.weight": np.concatenate([query, key, value]),
        f"{prefix}in_proj_z.weight": gate,
        f"{prefix}in_proj_b.weight": beta,
        f"{prefix}in_proj_a.weight": decay,
    }
    return {**{name: array for name, array in weights.items() if "in_proj_" not in name}, **apart}


def _unpacked(packed: Array, widths: tuple[int, ...], heads: int, flat: bool) -> list[Array]:
    """The parts of float64[heads * sum(widths), hidden_size], each with all heads in order."""
    ends = np.cumsum(widths)[:-1]
    if flat:
        return np.split(packed, heads * ends)
    parts = np.split(packed.reshape(heads, sum(widths), -1), ends, axis=1)
    return [part.reshape(-1, packed.shape[1]) for part in parts]


def _silent_mlp(hidden: int) -> Weights:
    """A dense MLP that adds nothing, for the dense oracle's layer."""
    row, column = np.zeros((1, hidden)), np.zeros((hidden, 1))
    return {"mlp.gate_proj.weight": row, "mlp.up_proj.weight": row, "mlp.down_proj.weight": column}


def _plain_layer(
    rows: Array, weights: Weights, config: FamilyConfig, state: LayerState, start: int, broken: str | None
) -> LayerRun:
    """A layer with plain norms, up to its MLP."""
    assert isinstance(state, FullState)
    attention_input = norm(rows, weights["input_layernorm.weight"], config, broken)
    attend = _latent_attention if isinstance(config.attention, Latent) else _grouped_attention
    positions = np.arange(start, start + len(rows))
    attention, state = attend(attention_input, subset(weights, "self_attn."), config, state, positions, broken)
    first = rows + attention
    mlp_input = norm(first, weights["post_attention_layernorm.weight"], config, broken)
    return LayerRun(attention_input, attention, first, mlp_input, np.zeros_like(first), first, state)


def _latent_attention(
    rows: Array, weights: Weights, config: FamilyConfig, state: FullState, positions: Array, broken: str | None
) -> tuple[Array, FullState]:
    """Attention whose keys and values are made from one latent row a position."""
    sizes = config.attention
    assert isinstance(sizes, Latent)
    rope, eps = latent_rope(config, broken), LATENT_NORM_EPS
    if broken == "latent_norm_eps":
        eps = config.rms_norm_eps
    query = rows
    if sizes.query_rank is not None:
        query = _plain_norm(rows @ weights["q_a_proj.weight"].T, weights["q_a_layernorm.weight"], eps, broken)
    query = query @ weights["q_proj.weight" if sizes.query_rank is None else "q_b_proj.weight"].T
    query = query.reshape(len(rows), sizes.heads, sizes.nope + sizes.rotated)
    if broken == "rotated_part_first":
        query_rotated, query_nope = np.split(query, [sizes.rotated], axis=-1)
    else:
        query_nope, query_rotated = np.split(query, [sizes.nope], axis=-1)
    down = rows @ weights["kv_a_proj_with_mqa.weight"].T
    latent, shared = np.split(down[:, None], [sizes.rank], axis=-1)
    latent = _plain_norm(latent, weights["kv_a_layernorm.weight"], eps, broken)
    shared = rotate(shared, positions, rope)
    state = FullState("full", np.concatenate([state.key, latent]), np.concatenate([state.value, shared]))
    key, value = _expanded(state.key[:, 0], weights["kv_b_proj.weight"], sizes, broken)
    scores = np.einsum("qhd,khd->hqk", query_nope, key)
    scores = scores + np.einsum("qhd,kd->hqk", rotate(query_rotated, positions, rope), state.value[:, 0])
    mixed = np.einsum("hqk,khd->qhd", _causal_softmax(scores * latent_scale(config, broken)), value)
    return mixed.reshape(len(rows), -1) @ weights["o_proj.weight"].T, state


def _expanded(latent: Array, weight: Array, sizes: Latent, broken: str | None) -> tuple[Array, Array]:
    """Key without position and value, each float64[positions, heads, ...], of every head."""
    both = latent @ weight.T
    if broken == "kv_b_flat":
        key, value = np.split(both, [sizes.heads * sizes.nope], axis=-1)
        return key.reshape(-1, sizes.heads, sizes.nope), value.reshape(-1, sizes.heads, sizes.value)
    both = both.reshape(-1, sizes.heads, sizes.nope + sizes.value)
    if broken == "mla_split":
        return both[..., sizes.value :], both[..., : sizes.value]
    return both[..., : sizes.nope], both[..., sizes.nope :]


def _grouped_attention(
    rows: Array, weights: Weights, config: FamilyConfig, state: FullState, positions: Array, broken: str | None
) -> tuple[Array, FullState]:
    """Attention with biases, optional norms per head, and rotation of the head's first part."""
    sizes = config.attention
    assert isinstance(sizes, Grouped)
    rope = grouped_rope(config, broken)

    def projected(name: str, heads: int) -> Array:
        out = rows @ weights[f"{name}_proj.weight"].T
        if broken != "no_attention_bias":
            out = out + weights.get(f"{name}_proj.bias", 0.0)
        out = out.reshape(len(rows), heads, sizes.head_dim)
        if name == "v" or not sizes.qk_norm or broken == "no_qk_norm":
            return out
        return norm(out, weights[f"{name}_norm.weight"], config, broken)

    query = rotate(projected("q", sizes.heads), positions, rope)
    key = rotate(projected("k", sizes.kv_heads), positions, rope)
    value = projected("v", sizes.kv_heads)
    state = FullState("full", np.concatenate([state.key, key]), np.concatenate([state.value, value]))
    # Query heads j * r .. j * r + r - 1 read key head j.
    query = query.reshape(len(rows), sizes.kv_heads, -1, sizes.head_dim)
    if broken == "heads_tiled":
        query = query.reshape(len(rows), -1, sizes.kv_heads, sizes.head_dim).swapaxes(1, 2)
    scores = np.einsum("qjrd,kjd->jrqk", query, state.key)
    if broken != "unscaled_scores":
        scores = scores / np.sqrt(sizes.head_dim)
    mixed = np.einsum("jrqk,kjd->qjrd", _causal_softmax(scores), state.value)
    if broken == "heads_tiled":
        mixed = mixed.swapaxes(1, 2)
    return mixed.reshape(len(rows), -1) @ weights["o_proj.weight"].T, state


def _causal_softmax(scores: Array) -> Array:
    """Softmax over the last axis; the newest query row lines up with the newest key row."""
    queries, keys = scores.shape[-2:]
    future = np.arange(keys) > np.arange(keys - queries, keys)[:, None]
    powers = np.where(future, -np.inf, scores)
    powers = np.exp(powers - powers.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _plain_norm(rows: Array, weight: Array, eps: float, broken: str | None) -> Array:
    return rms(rows, eps) * (1.0 + weight if broken == "one_plus_gain" else weight)
