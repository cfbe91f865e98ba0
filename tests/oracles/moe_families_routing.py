"""Experts in float64: who gets a token, with which weight, and what comes out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.oracles.float64_checkpoint import Array, Weights, subset
from tests.oracles.float64_layers import sigmoid, silu
from tests.oracles.moe_families_checkpoint import Routing


class Route(NamedTuple):
    """Where T tokens go.

    weights: float64[T, experts], 0 where a token does not go.
    margin: float64[T], how far the last choice is ahead of the first that was not made, the groups'
        choice included. A near tie may fall otherwise in lower precision.
    """

    weights: Array
    margin: Array

    @property
    def chosen(self) -> Array:
        """bool[T, experts]"""
        return self.weights != 0.0


def feed_forward(rows: Array, weights: Weights, routing: Routing, broken: str | None) -> Array:
    """A layer's MLP, dense or sparse as its tensors are."""
    if "gate_proj.weight" in weights:
        return _mlp(rows, weights)
    route_ = route(rows, weights, routing, broken)
    gate, up = weights["experts.gate"], weights["experts.up"]
    if broken == "up_gate_swapped":
        gate, up = up, gate
    experts, width, hidden = gate.shape
    # Every expert for every token; who is not chosen has the weight 0.
    inner = silu(rows @ gate.reshape(-1, hidden).T) * (rows @ up.reshape(-1, hidden).T)
    inner = inner.reshape(-1, experts, width) * route_.weights[..., None]
    routed = inner.reshape(len(rows), -1) @ weights["experts.down"].swapaxes(1, 2).reshape(-1, hidden)
    return routed + _shared(rows, weights, routing, broken)


def route(rows: Array, weights: Weights, routing: Routing, broken: str | None) -> Route:
    """The weights of a sparse layer's experts for float64[T, hidden_size], already normed."""
    logits = rows @ weights["gate.weight"].T
    if routing.biased:
        return _biased_route(logits, weights["gate.e_score_correction_bias"], routing, broken)
    if broken == "sigmoid_scores":
        scores = sigmoid(logits)
    elif broken == "softmax_after_topk":
        kept, _ = _top(logits, routing.per_token)
        scores = _softmax(np.where(kept, logits, -np.inf))
    else:
        scores = _softmax(logits)
    kept, margin = _top(scores, routing.per_token)
    chosen = np.where(kept, scores, 0.0)
    return Route(_normed(chosen, routing, broken), margin)


def _biased_route(logits: Array, bias: Array, routing: Routing, broken: str | None) -> Route:
    scores = _softmax(logits) if broken == "softmax_scores" else sigmoid(logits)
    preference = scores if broken == "no_correction_bias" else scores + bias
    margin = np.full(len(logits), np.inf)
    if broken != "no_groups":
        preference, margin = _within_groups(preference, routing, broken)
    kept, own_margin = _top(preference, routing.per_token)
    # The bias only chooses: the weights are the scores without it.
    weights = scores + bias if broken == "bias_in_weights" else scores
    weights = _normed(np.where(kept, weights, 0.0), routing, broken)
    scaling = 1.0 if broken == "no_scaling" else routing.scaling
    return Route(weights * scaling, np.minimum(margin, own_margin))


def _within_groups(preference: Array, routing: Routing, broken: str | None) -> tuple[Array, Array]:
    """Preferences with all experts outside the best groups ruled out, and the groups' margin."""
    tokens, experts = preference.shape
    grouped = preference.reshape(tokens, routing.groups, experts // routing.groups)
    # A group is as good as its two best experts together.
    best = np.sort(grouped, axis=-1)[..., -1:] if broken == "group_by_best" else np.sort(grouped, axis=-1)[..., -2:]
    kept, margin = _top(best.sum(-1), routing.chosen_groups)
    # Not 0: with a negative bias a ruled-out expert would win over an allowed one.
    outside = 0.0 if broken == "groups_ruled_out_by_zero" else -np.inf
    return np.where(kept[..., None], grouped, outside).reshape(tokens, experts), margin


def _top(scores: Array, count: int) -> tuple[Array, Array]:
    """bool, the `count` best of every row, and how far the last of them is ahead of the rest."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=-1)
    kept = np.zeros(scores.shape, bool)
    np.put_along_axis(kept, order[:, :count], True, axis=-1)
    if count == scores.shape[1]:
        return kept, np.full(len(scores), np.inf)
    return kept, ranked[:, count - 1] - ranked[:, count]


def _normed(weights: Array, routing: Routing, broken: str | None) -> Array:
    if not routing.renormalised or broken == "no_topk_norm":
        return weights
    # The families with sigmoids add 1e-20 to the sum; the least sum float64 sees is far above it.
    return weights / weights.sum(-1, keepdims=True)


def _shared(rows: Array, weights: Weights, routing: Routing, broken: str | None) -> Array:
    """The MLP that every token goes through; only the Qwen families gate it."""
    if broken == "no_shared_expert":
        return np.zeros_like(rows)
    if routing.biased:
        shared = _mlp(rows, subset(weights, "shared_experts."))
        return shared * routing.scaling if broken == "shared_expert_scaled" else shared
    shared = _mlp(rows, subset(weights, "shared_expert."))
    if broken == "shared_gate_ungated":
        return shared
    return shared * sigmoid(rows @ weights["shared_expert_gate.weight"].T)


def _mlp(rows: Array, weights: Weights) -> Array:
    gate, up = rows @ weights["gate_proj.weight"].T, rows @ weights["up_proj.weight"].T
    return (silu(gate) * up) @ weights["down_proj.weight"].T


def _softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
