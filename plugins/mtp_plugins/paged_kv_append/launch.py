"""Sizes and parameter types of a launch of the PagedKvAppend kernel."""

from __future__ import annotations

from mtp_plugins.triton_kernels.launch import Launch, check_page_size, pointers, power_of_two

NUM_WARPS = 4


def launch(*, batch: int, rows: int, max_pages: int, page_size: int, kv_heads: int, head_dim: int) -> Launch:
    """Grid, integers and constants for these sizes.

    Raises:
        ValueError: page_size is no power of two.
    """
    check_page_size(page_size)
    width = kv_heads * head_dim
    return Launch(
        grid=(rows, batch, 1),
        scalars={"rows": rows, "max_pages": max_pages},
        constexprs={"page_size": page_size, "width": width, "block": power_of_two(width)},
        num_warps=NUM_WARPS,
    )


def signature(element: str) -> dict[str, str]:
    """Type of every parameter, with keys, values and pages in `element` ("fp32", "bf16", "fp16")."""
    pages = ("past_key_pages", "past_value_pages", "present_key_pages", "present_value_pages")
    integers = pointers("i32", "block_table", "lengths") | {"rows": "i32", "max_pages": "i32"}
    return pointers(element, "key", "value", *pages) | integers
