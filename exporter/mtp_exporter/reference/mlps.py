"""MLPs of the NumPy forward: gated, and mixtures of experts with their routing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts.model import MoeSpec
from mtp_exporter.reading.source import Source
from mtp_plugins.arrays import Array
from mtp_plugins.causal_conv_state.reference import silu
from mtp_plugins.routed_experts.reference import routed_experts

_SUM_EPSILON = 1e-20
_NEAR_TIE = 1e-4
"""Share of a row's greatest score. Rounding moves scores by less than 1e-5 of it, and may turn a choice around."""

Ids = npt.NDArray[np.int64]


def dense_mlp(weights: Source, x: Array) -> Array:
    """down(silu(gate(x)) * up(x))."""
    return np.asarray((silu(x @ weights("gate").T) * (x @ weights("up").T)) @ weights("down").T)


def mixture_of_experts(moe: MoeSpec, weights: Source, x: Array, preferred: Ids | None = None) -> Array:
    """Routed experts and shared expert for float[rows, hidden_size]; one expert is read at a time.

    Args:
        preferred: int64[rows, top_k], taken where they are as good as the best up to rounding.
    """
    chosen, shares = route(moe, weights, x, preferred)
    output = routed_experts(
        x,
        chosen,
        shares,
        lambda expert: weights.rows("experts.gate_up", expert, 1)[0],
        lambda expert: weights.rows("experts.down", expert, 1)[0],
    )
    if moe.shared_intermediate_size:
        shared = dense_mlp(weights.below("shared."), x)
        output = output + (shared / (1 + np.exp(-(x @ weights("shared_gate").T))) if moe.shared_gate else shared)
    return np.asarray(output)


def route(moe: MoeSpec, weights: Source, x: Array, preferred: Ids | None = None) -> tuple[Ids, Array]:
    """Chosen experts and their weights, [rows, top_k]; near ties go to the preferred ones, ties to the lower number."""
    logits = x @ weights("router").T
    if moe.scoring == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores = scores / scores.sum(-1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    ranked = scores + weights("correction_bias") if moe.correction_bias else scores
    if preferred is not None:
        bonus = np.zeros_like(ranked)
        np.put_along_axis(bonus, preferred, _NEAR_TIE * scores.max(-1, keepdims=True), axis=-1)
        ranked = ranked + bonus
    if moe.groups > 1:
        grouped = ranked.reshape(len(x), moe.groups, -1)
        strength = np.sort(grouped, axis=-1)[:, :, -2:].sum(-1)
        best = np.argsort(-strength, axis=-1, kind="stable")[:, : moe.top_groups]
        allowed = np.zeros(strength.shape, np.bool_)
        np.put_along_axis(allowed, best, True, axis=-1)
        ranked = np.where(allowed[:, :, None], grouped, -np.inf).reshape(len(x), -1)
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : moe.top_k]
    shares = np.take_along_axis(scores, chosen, axis=-1)
    if moe.normalise:
        shares = shares / (shares.sum(-1, keepdims=True) + _SUM_EPSILON)
    return chosen, np.asarray(shares * moe.scale)
