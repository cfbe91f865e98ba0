"""NumPy reference of CachedAttention."""

from __future__ import annotations

import numpy as np

from mtp_plugins.arrays import Array


def cached_attention(query: Array, key: Array, value: Array, past_rows: int) -> Array:
    """Causal grouped-query attention of the last rows of one sequence.

    Args:
        query: float[rows, num_heads, head_dim], normed and rotated.
        key, value: float[past_rows + rows, num_kv_heads, head_dim], the cache with the new rows.
        past_rows: rows of the cache that precede the first query.

    Returns:
        float[rows, num_heads, head_dim].
    """
    rows, heads, head_dim = query.shape
    repeat = heads // key.shape[1]
    keys, values = key.repeat(repeat, axis=1), value.repeat(repeat, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, keys) * head_dim**-0.5
    hidden = np.arange(keys.shape[0])[None, :] > past_rows + np.arange(rows)[:, None]
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, values))
