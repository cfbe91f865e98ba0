"""NumPy reference of DeferredConv."""

from __future__ import annotations

import numpy as np

from mtp_plugins.arrays import Array
from mtp_plugins.causal_conv_state.reference import causal_conv_state


def deferred_conv(
    x: Array, weight: Array, state: Array, staged: Array, accepted_rows: int, kept_rows: int
) -> tuple[Array, Array, Array]:
    """Commit rows of the last call, then run new rows from there and keep the first of them, for one sequence.

    Args:
        x: float[rows, channels], the new raw rows.
        weight: float[channels, 1, kernel].
        state: float[kernel - 1, channels], the raw rows before the staged ones.
        staged: float[staged_rows, channels], the raw rows of the last call.
        accepted_rows: how many of the staged rows are committed, from the first.
        kept_rows: how many of the new rows are committed, from the first.

    Returns:
        float[rows, channels]; the last kernel - 1 raw rows up to the kept ones; the new raw rows, staged_rows of them
        at most.
    """
    committed = np.concatenate([state, staged[:accepted_rows]])[accepted_rows:]
    output, _ = causal_conv_state(x, weight, committed)
    return output, np.concatenate([committed, x[:kept_rows]])[kept_rows:], x[: len(staged)]
