"""NumPy reference of PagedKvAppend."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array


def paged_kv_append(
    rows: Array, pages: Array, block_table: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]
) -> Array:
    """The pages of keys, or of values, with the new rows of every sequence.

    Args:
        rows: float[batch, rows, num_kv_heads * head_dim].
        pages: float[pages, page_size, num_kv_heads, head_dim]; not changed.
        block_table: int32[batch, max_pages]; a row of a negative page, or behind the table, is left out.
        lengths: int32[batch], the rows committed before.

    Returns:
        float[pages, page_size, num_kv_heads, head_dim].
    """
    pages = pages.copy()
    page_size = pages.shape[1]
    for sequence, length in enumerate(lengths):
        for row in range(rows.shape[1]):
            column, slot = divmod(int(length) + row, page_size)
            if column < block_table.shape[1] and block_table[sequence, column] >= 0:
                pages[block_table[sequence, column], slot] = rows[sequence, row].reshape(pages.shape[2:])
    return pages
