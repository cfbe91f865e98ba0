# mypy: disable-error-code="import-untyped, import-not-found"
"""Sizes, grids and compile-time arguments of the PagedAttention kernels, and their launch on tensors of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton

from mtp_plugins.paged_attention.kernel import combine_kernel, partial_kernel

# None of these may depend on rows, batch, lengths or pages: a row's bits would.
SPLIT = 256
"""Positions in a partial result."""
MIN_BLOCK_Q = 16
"""Heads in a tile at least: what a matrix product takes."""
BLOCK_S = 16
"""Partial results that are combined at once."""
MAX_ROWS = 16

Constants = dict[str, int | float | bool]


@dataclass(frozen=True)
class Plan:
    """How the two kernels are launched for one set of shapes.

    `scratch` has the float32 shapes of partial_max, partial_sum and partial_output.
    """

    partial_grid: tuple[int, int, int]
    partial: Constants
    combine_grid: tuple[int]
    combine: Constants
    splits: int
    scratch: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def plan(
    query: tuple[int, int, int],
    pages: tuple[int, int, int, int],
    max_pages: int,
    item_bytes: int,
    *,
    scale: float | None = None,
) -> Plan:
    """The launch for query T[batch, rows, num_heads * head_dim] over T[pages, page_size, num_kv_heads, head_dim].

    Args:
        item_bytes: bytes of an element of T.
        scale: factor of the scores; None for head_dim ** -0.5.

    Raises:
        ValueError: the kernels do not take these shapes.
    """
    batch, rows, width = query
    _, page_size, kv_heads, head_dim = pages
    _check(rows, page_size, kv_heads, head_dim, width)
    heads, splits = width // head_dim, -(-max_pages * page_size // SPLIT)
    group, block_d = heads // kv_heads, _power_of_two(head_dim)
    shared: Constants = {"M": rows, "HEAD_DIM": head_dim, "SPLIT": SPLIT, "BLOCK_D": block_d}
    partial: Constants = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "PAGE_SIZE": page_size,
        "LOG2_SCALE": (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
        "BLOCK_Q": max(MIN_BLOCK_Q, _power_of_two(group)),
        # So that keys and values of a tile fit the shared memory of every card from compute capability 8.0 on.
        "BLOCK_N": 64 if block_d * item_bytes <= 256 else 32,
        # The interpreter would multiply the bits of bfloat16.
        "WIDEN": bool(triton.knobs.runtime.interpret),
    }
    partials = (batch, rows, heads, splits)
    return Plan(
        # Rows first: programs that read the same pages run side by side.
        partial_grid=(rows, batch * kv_heads, splits),
        partial=shared | partial,
        combine_grid=(batch * rows * heads,),
        combine=shared | {"HEADS": heads, "BLOCK_S": BLOCK_S},
        splits=splits,
        scratch=(partials, partials, (*partials, head_dim)),
    )


def paged_attention(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    block_table: Any,
    lengths: Any,
    scratch: tuple[Any, Any, Any],
    output: Any,
    launch: Plan,
) -> None:
    """Run both kernels; everything is contiguous, on one device and owned by the caller.

    Args:
        query, key_pages, value_pages, block_table, lengths: as in `OPERATOR`.
        scratch: float32 tensors of the shapes in `launch.scratch`; written, of no use afterwards.
        output: like query; written.
        launch: `plan` of these shapes.
    """
    partial_kernel[launch.partial_grid](
        query,
        key_pages,
        value_pages,
        block_table,
        lengths,
        block_table.shape[1],
        *scratch,
        **launch.partial,
        num_stages=2,
    )
    combine_kernel[launch.combine_grid](*scratch, lengths, launch.splits, output, **launch.combine)


def _power_of_two(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _check(rows: int, page_size: int, kv_heads: int, head_dim: int, width: int) -> None:
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"A call has {rows} query rows; the kernels take 1 to {MAX_ROWS}. Draft fewer tokens.")
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"The pages have {page_size} rows; the kernels need a power of two. Lay the cache out so.")
    if not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim is {head_dim}; the kernels take 16 to 256.")
    if width % (head_dim * kv_heads):
        raise ValueError(f"A query row of {width} is no multiple of {kv_heads} key heads of {head_dim}.")
