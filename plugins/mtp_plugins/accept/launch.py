"""Sizes and parameter types of a launch of the Accept kernel."""

from __future__ import annotations

from mtp_plugins.triton_kernels.launch import Launch, pointers, power_of_two

BLOCK = 16
"""Tokens that one compiled kernel takes, pending and draft; for more there is another."""


def launch(*, batch: int, draft_tokens: int) -> Launch:
    """Grid, integers and constants for these sizes."""
    block = max(BLOCK, power_of_two(draft_tokens + 1))
    return Launch(grid=(batch, 1, 1), scalars={"draft_tokens": draft_tokens}, constexprs={"block": block}, num_warps=1)


def signature() -> dict[str, str]:
    """Type of every parameter."""
    ids = pointers("i64", "draft", "chosen", "emitted", "next_token")
    return ids | pointers("i32", "accepted", "accepted_rows") | {"draft_tokens": "i32"}
