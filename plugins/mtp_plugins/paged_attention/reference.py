"""NumPy reference of PagedAttention."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array
from mtp_plugins.cached_attention.reference import cached_attention


def paged_attention(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    block_table: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    scale: float | None = None,
) -> Array:
    """Causal grouped-query attention of the last rows of every sequence over its pages.

    Args:
        query: float[batch, rows, num_heads * head_dim], normed and rotated.
        key_pages, value_pages: float[pages, page_size, num_kv_heads, head_dim], with the new rows.
        block_table: int32[batch, max_pages]; a negative page is one of zeros.
        lengths: int32[batch], the rows before the first query.
        scale: factor of the scores; None for head_dim ** -0.5.

    Returns:
        float[batch, rows, num_heads * head_dim].
    """
    _, rows, width = query.shape
    page_size, _, head_dim = key_pages.shape[1:]
    # The reference of CachedAttention scales by head_dim ** -0.5.
    factor = 1.0 if scale is None else scale * head_dim**0.5
    outputs = []
    for sequence, length in enumerate(lengths):
        positions = np.arange(min(int(length) + rows, block_table.shape[1] * page_size))
        pages = block_table[sequence, positions // page_size]
        places = np.maximum(pages, 0), positions % page_size
        # Not a product: what lies in page 0 may be NaN.
        key, value = (np.where((pages >= 0)[:, None, None], store[places], 0) for store in (key_pages, value_pages))
        split = query[sequence].reshape(rows, width // head_dim, head_dim) * factor
        outputs.append(cached_attention(split, key, value, int(length)).reshape(rows, -1))
    return np.stack(outputs)
