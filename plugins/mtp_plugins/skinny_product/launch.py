"""Sizes and parameter types of a launch of the SkinnyProduct kernel."""

from __future__ import annotations

from mtp_plugins.triton_kernels.launch import Launch, blocks, pointers

# None of these may depend on rows or batch: a row's bits would.
ROW_BLOCK = 16
"""Rows of a tile: the fewest that a matrix instruction takes, and the most of a verify."""
OUT_BLOCK = 32
BLOCK_BYTES = 256
"""Bytes of each row of x and of the weight in one block of the reduction; four stages of a tile take 36 KiB."""
NUM_WARPS = 4
NUM_STAGES = 4


def launch(*, batch: int, rows: int, width_in: int, width_out: int, item_bytes: int = 2, widen: bool = False) -> Launch:
    """Grid, integers and constants for these sizes.

    Args:
        item_bytes: size of an element of T.
        widen: multiply in float32, for Triton's interpreter.
    """
    return Launch(
        # Tiles of rows first: programs that read the same part of the weight run side by side.
        grid=(blocks(batch * rows, ROW_BLOCK), blocks(width_out, OUT_BLOCK), 1),
        scalars={"rows": batch * rows},
        constexprs={
            "width_in": width_in,
            "width_out": width_out,
            "row_block": ROW_BLOCK,
            "in_block": BLOCK_BYTES // item_bytes,
            "out_block": OUT_BLOCK,
            "widen": widen,
        },
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )


def signature(element: str, output: str = "fp32") -> dict[str, str]:
    """Type of every parameter, with x and weight in `element` ("fp32", "bf16", "fp16"), the result in `output`."""
    return pointers(element, "x", "weight") | pointers(output, "output") | {"rows": "i32"}
