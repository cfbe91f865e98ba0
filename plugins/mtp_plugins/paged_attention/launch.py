"""Sizes and parameter types of the launches of the two PagedAttention kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtp_plugins.triton_kernels.launch import Launch, blocks, check_page_size, pointers, power_of_two

# None of these may depend on rows, batch, lengths or pages: a row's bits would.
SPLIT_SIZE = 256
"""Positions in a partial result."""
MIN_TILE, MAX_KEYS = 16, 64
"""Heads, or keys, in a tile at least: what a matrix product takes; and keys at most."""
SPLITS_BLOCK = 16
"""Partial results that are combined at once."""
SHARED_BYTES = 46 << 10
"""Shared memory of a tile: a launch has 48 KiB unasked, of which sums take some. Only float32 with more than 128
dimensions, or groups of many heads, need more than that; `Ptx.shared` says how much."""
MAX_ROWS = 1024
NUM_WARPS = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; `heads` are those of the query, `item_bytes` the size of an element of T.

    Raises:
        ValueError: the kernels do not take these sizes.
    """

    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int
    item_bytes: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"A call has {self.rows} query rows; the kernels take 1 to {MAX_ROWS}. Take fewer.")
        if not 16 <= self.head_dim <= 256:
            raise ValueError(f"head_dim is {self.head_dim}; the kernels take 16 to 256.")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads are no multiple of {self.kv_heads} key heads.")
        check_page_size(self.page_size)

    @property
    def splits(self) -> int:
        """Partial results of a query row at most."""
        return blocks(self.max_pages * self.page_size, SPLIT_SIZE)

    def scratch(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what the first kernel leaves for the second, in float32."""
        partials = (self.batch, self.rows, self.heads, self.splits)
        return {"partial_max": partials, "partial_sum": partials, "partial_output": (*partials, self.head_dim)}


def launch_partial(sizes: Sizes, *, scale: float | None = None, widen: bool = False) -> Launch:
    """Grid, integers and constants of `paged_attention_partial`.

    Args:
        scale: factor of the scores; None for head_dim ** -0.5.
        widen: multiply in float32, for Triton's interpreter.
    """
    group, dim_block = sizes.heads // sizes.kv_heads, power_of_two(sizes.head_dim)
    head_block = max(MIN_TILE, power_of_two(group))
    return Launch(
        # Rows first: programs that read the same pages run side by side.
        grid=(sizes.rows, sizes.batch * sizes.kv_heads, sizes.splits),
        scalars={"rows": sizes.rows, "max_pages": sizes.max_pages},
        constexprs={
            "kv_heads": sizes.kv_heads,
            "group": group,
            "head_dim": sizes.head_dim,
            "page_size": sizes.page_size,
            "log2_scale": (sizes.head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
            "split_size": SPLIT_SIZE,
            "head_block": head_block,
            "key_block": _key_block(head_block, dim_block * sizes.item_bytes),
            "dim_block": dim_block,
            "widen": widen,
        },
        num_warps=NUM_WARPS,
        num_stages=2,
    )


def _key_block(head_block: int, row_bytes: int) -> int:
    """Keys in a tile, which has a query of `head_block` rows and as many values as keys beside it."""
    most = (SHARED_BYTES - head_block * row_bytes) // (2 * row_bytes)
    return min(MAX_KEYS, max(MIN_TILE, power_of_two(most + 1) // 2))


def launch_combine(sizes: Sizes) -> Launch:
    """Grid, integers and constants of `paged_attention_combine`."""
    return Launch(
        grid=(sizes.heads, sizes.rows, sizes.batch),
        scalars={"rows": sizes.rows, "splits": sizes.splits},
        constexprs={
            "heads": sizes.heads,
            "head_dim": sizes.head_dim,
            "split_size": SPLIT_SIZE,
            "splits_block": SPLITS_BLOCK,
            "dim_block": power_of_two(sizes.head_dim),
        },
        num_warps=NUM_WARPS,
    )


def signature_partial(element: str) -> dict[str, str]:
    """Type of every parameter, with the query and the pages in `element` ("fp32", "bf16", "fp16")."""
    floats = pointers(element, "query", "key_pages", "value_pages") | pointers("fp32", *_PARTIALS)
    return floats | pointers("i32", "block_table", "lengths") | {"rows": "i32", "max_pages": "i32"}


def signature_combine(element: str) -> dict[str, str]:
    """Type of every parameter, with the output in `element`."""
    floats = pointers("fp32", *_PARTIALS) | pointers(element, "output")
    return floats | pointers("i32", "lengths") | {"rows": "i32", "splits": "i32"}


_PARTIALS = ("partial_max", "partial_sum", "partial_output")
