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


def commit(state: Array, rows: Factors, count: int) -> Array:
    """The state float[value_heads, key_dim, value_dim] after the first `count` rows."""
    keys = rows.key.repeat(rows.value.shape[1] // rows.key.shape[1], axis=1)
    for row in range(count):
        state = delta_row(state, keys[row], rows.value[row], rows.decay[row], rows.beta[row])
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
    kept_rows: int,
) -> tuple[Array, Array, Factors]:
    """Commit rows of the last call, then run new rows from there and keep the first of them, for one sequence.

    Args:
        query, key, value, decay, beta: the new rows, as `gated_delta` takes them.
        state: float[value_heads, key_dim, value_dim], committed; not changed.
        staged: factors of the last call; their number is how many a call can leave.
        accepted_rows: how many of the staged rows are committed, from the first.
        kept_rows: how many of the new rows are committed, from the first.

    Returns:
        float[rows, value_heads, value_dim]; the state after the accepted staged rows and the kept new ones; the
        factors of the new rows, as many as there are staged ones at most.
    """
    committed = commit(state, staged, accepted_rows)
    outputs, _ = gated_delta(query, key, value, decay, beta, committed)
    new = Factors(unit_rows(key), value, decay, beta)
    room = len(staged.decay)
    following = Factors(new.key[:room], new.value[:room], new.decay[:room], new.beta[:room])
    return outputs, commit(committed, new, kept_rows), following
