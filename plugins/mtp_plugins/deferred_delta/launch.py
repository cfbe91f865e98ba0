"""Sizes and parameter types of a launch of the DeferredDelta kernel."""

from __future__ import annotations

from mtp_plugins.triton_kernels.launch import Launch, blocks, pointers, power_of_two

VALUE_BLOCK = 32
"""Value dimensions of one program: with key_dim 128 its part of the state takes 32 registers of a thread."""
NUM_WARPS = 4


def launch(
    *,
    batch: int,
    rows: int,
    staged_rows: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    value_block: int = VALUE_BLOCK,
) -> Launch:
    """Grid and constants for these sizes; `value_block` is a power of two and need not divide `value_dim`."""
    return Launch(
        grid=(blocks(value_dim, value_block), value_heads, batch),
        scalars={"rows": rows},
        constexprs={
            "staged_rows": staged_rows,
            "key_heads": key_heads,
            "value_heads": value_heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "key_block": power_of_two(key_dim),
            "value_block": value_block,
        },
        num_warps=NUM_WARPS,
    )


def signature(element: str) -> dict[str, str]:
    """Type of every parameter, with queries, keys, values and the output in `element` ("fp32", "bf16", "fp16")."""
    short = ("query", "key", "value", "staged_value", "output", "next_value")
    wide = ("decay", "beta", "past_state", "staged_key", "staged_decay", "staged_beta")
    wide_outputs = ("present_state", "next_key", "next_decay", "next_beta")
    floats = pointers(element, *short) | pointers("fp32", *wide, *wide_outputs)
    return floats | pointers("i32", "accepted_rows", "kept_rows") | {"rows": "i32"}
