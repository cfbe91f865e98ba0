"""NumPy reference of GatedDelta."""

from __future__ import annotations

import numpy as np

from mtp_plugins.arrays import Array

L2_EPSILON = 1e-6
"""Inside the square root, fixed, whatever the model's norm epsilon is."""


def unit_rows(x: Array) -> Array:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return np.asarray(x / np.sqrt(np.square(x).sum(-1, keepdims=True) + L2_EPSILON))


def delta_row(state: Array, key: Array, value: Array, decay: Array, beta: Array) -> Array:
    """The state after one row: S <- exp(g) S; d = beta (v - S^T k); S <- S + k d^T.

    Args:
        state: float[value_heads, key_dim, value_dim]; not changed.
        key: float[value_heads, key_dim], of unit length.
        value: float[value_heads, value_dim].
        decay, beta: float[value_heads]; decay in log space.
    """
    faded = state * np.exp(decay)[:, None, None]
    delta = beta[:, None] * (value - np.einsum("hkv,hk->hv", faded, key))
    return np.asarray(faded + key[:, :, None] * delta[:, None, :])


def gated_delta(query: Array, key: Array, value: Array, decay: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """Rows of the gated delta rule for one sequence: for each row the state of `delta_row`, then o = S^T q.

    Key head j serves the value heads j*r .. j*r+r-1.

    Args:
        query, key: float[rows, key_heads, key_dim], not normalised.
        value: float[rows, value_heads, value_dim].
        decay, beta: float[rows, value_heads]; decay in log space.
        state: float[value_heads, key_dim, value_dim]; not changed.

    Returns:
        float[rows, value_heads, value_dim], and the state after the last row.
    """
    repeat = value.shape[1] // key.shape[1]
    queries = (unit_rows(query) * query.shape[-1] ** -0.5).repeat(repeat, axis=1)
    keys = unit_rows(key).repeat(repeat, axis=1)
    outputs = np.empty_like(value)
    for row in range(value.shape[0]):
        state = delta_row(state, keys[row], value[row], decay[row], beta[row])
        outputs[row] = np.einsum("hkv,hk->hv", state, queries[row])
    return outputs, state
