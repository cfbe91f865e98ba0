"""Launches the Triton kernel of PagedKvAppend on tensors of torch."""

from __future__ import annotations

from typing import Any

from mtp_plugins.paged_kv_append.kernel import append_kernel


def constants(rows: int, page_size: int, width: int) -> dict[str, int]:
    """The compile-time arguments of the kernel for `rows` new rows of `width` elements.

    Raises:
        ValueError: page_size is not a power of two.
    """
    if page_size & (page_size - 1) or page_size < 1:
        raise ValueError(f"The pages have {page_size} rows; the kernels need a power of two. Lay the cache out so.")
    return {"M": rows, "PAGE_SIZE": page_size, "WIDTH": width, "BLOCK": 1 << (width - 1).bit_length()}


def paged_kv_append(key: Any, value: Any, key_pages: Any, value_pages: Any, block_table: Any, lengths: Any) -> None:
    """Write the new rows into the pages, in place.

    Args:
        key, value: T[batch, rows, num_kv_heads * head_dim], contiguous.
        key_pages, value_pages: T[pages, page_size, num_kv_heads, head_dim], contiguous; written.
        block_table: int32[batch, max_pages], contiguous.
        lengths: int32[batch], the rows committed before.
    """
    batch, rows, width = key.shape
    append_kernel[(batch * rows,)](
        key,
        value,
        key_pages,
        value_pages,
        block_table,
        lengths,
        block_table.shape[1],
        key_pages,
        value_pages,
        **constants(rows, key_pages.shape[1], width),
    )
