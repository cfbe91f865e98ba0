"""NumPy reference of RoutedExperts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array
from mtp_plugins.causal_conv_state.reference import silu


def routed_experts(
    x: Array,
    expert_ids: npt.NDArray[np.int64],
    expert_weights: Array,
    gate_up: Callable[[int], Array],
    down: Callable[[int], Array],
) -> Array:
    """Each row through its experts, one row and one expert at a time.

    Args:
        x: float[rows, hidden].
        expert_ids, expert_weights: [rows, top_k].
        gate_up: expert -> float[2 * intermediate, hidden], gate rows first.
        down: expert -> float[hidden, intermediate].

    Returns:
        float[rows, hidden].
    """
    output = np.zeros_like(x)
    for expert in np.unique(expert_ids):
        matrices = gate_up(int(expert)), down(int(expert))
        for row, slot in np.argwhere(expert_ids == expert):
            gate, up = np.split(matrices[0] @ x[row], 2)
            output[row] += expert_weights[row, slot] * (matrices[1] @ (silu(gate) * up))
    return output
