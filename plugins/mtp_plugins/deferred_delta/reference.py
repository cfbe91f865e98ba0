"""NumPy reference of DeferredDelta."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_plugins.arrays import Array
from mtp_plugins.gated_delta.reference import delta_row, gated_delta, unit_rows


@dataclass(frozen=True)
class Factors:
    """What the rows of one call leave for the next, which may make some of them permanent.

    key: float[rows, key_heads, key_dim], of unit length; value: float[rows, value_heads, value_dim];
    decay (log space) and beta: float[rows, value_heads].
    """

    key: Array
    value: Array
    decay: Array
    beta: Array


def commit(state: Array, staged: Factors, accepted_rows: int) -> Array:
    """The state float[value_heads, key_dim, value_dim] after the first `accepted_rows` staged rows."""
    keys = staged.key.repeat(staged.value.shape[1] // staged.key.shape[1], axis=1)
    for row in range(accepted_rows):
        state = delta_row(state, keys[row], staged.value[row], staged.decay[row], staged.beta[row])
    return state


def deferred_delta(
    query: Array,
    key: Array,
    value: Array,
    decay: Array,
    beta: Array,
    state: Array,
    staged: Factors,
    accepted_rows: int,
) -> tuple[Array, Array, Factors]:
    """Commit rows of the last call, then run new rows from there without keeping them, for one sequence.

    Args:
        query, key, value, decay, beta: the new rows, as `gated_delta` takes them.
        state: float[value_heads, key_dim, value_dim], committed; not changed.
        staged: factors that the last call returned.
        accepted_rows: how many of the staged rows are committed, from the first.

    Returns:
        float[rows, value_heads, value_dim]; the state after the accepted staged rows, before any new row; the
        factors of the new rows.
    """
    committed = commit(state, staged, accepted_rows)
    outputs, _ = gated_delta(query, key, value, decay, beta, committed)
    return outputs, committed, Factors(unit_rows(key), value, decay, beta)
