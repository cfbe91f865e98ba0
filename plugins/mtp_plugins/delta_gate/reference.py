"""NumPy reference of DeltaGate."""

from __future__ import annotations

import numpy as np

from mtp_plugins.arrays import Array


def delta_gate(a: Array, b: Array, dt_bias: Array, a_log: Array) -> tuple[Array, Array]:
    """decay = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b), both float[rows, value_heads]."""
    decay = -np.exp(a_log) * np.logaddexp(0, a + dt_bias)
    return np.asarray(decay), np.asarray(1 / (1 + np.exp(-b)))
