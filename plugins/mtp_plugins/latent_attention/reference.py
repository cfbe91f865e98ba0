"""NumPy reference of LatentAttention."""

from __future__ import annotations

from mtp_plugins.arrays import Array
from mtp_plugins.cached_attention.reference import cached_attention


def latent_attention(query: Array, cache: Array, past_rows: int) -> Array:
    """Causal attention of the last rows of one sequence over a cache that is key and value at once.

    Args:
        query: float[rows, num_heads, row_width].
        cache: float[past_rows + rows, row_width].
        past_rows: rows of the cache that precede the first query.

    Returns:
        float[rows, num_heads, row_width].
    """
    return cached_attention(query, cache[:, None], cache[:, None], past_rows)
