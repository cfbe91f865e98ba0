"""NumPy reference of CausalConvState."""

from __future__ import annotations

import numpy as np

from mtp_plugins.arrays import Array


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-x)))


def causal_conv_state(x: Array, weight: Array, state: Array) -> tuple[Array, Array]:
    """silu(sum_j weight[c, 0, j] u[t - kernel + 1 + j, c]) for one sequence.

    Args:
        x: float[rows, channels], raw rows.
        weight: float[channels, 1, kernel].
        state: float[kernel - 1, channels], the raw rows before x.

    Returns:
        float[rows, channels], and the last kernel - 1 raw rows (before the convolution and silu).
    """
    kernel = weight.shape[-1]
    window = np.concatenate([state, x])
    rows = x.shape[0]
    total = sum(window[j : j + rows] * weight[:, 0, j] for j in range(kernel))
    return silu(np.asarray(total)), window[rows:]
