"""Sizes and parameter types of a launch of the Accept kernel."""

from __future__ import annotations

from mtp_plugins.triton_kernels.launch import Launch, power_of_two


def launch(*, batch: int, draft_tokens: int) -> Launch:
    """Grid and constants for these sizes."""
    constexprs = {"draft_tokens": draft_tokens, "block": power_of_two(draft_tokens + 1)}
    return Launch(grid=(batch, 1, 1), constexprs=constexprs, num_warps=1)


def signature() -> dict[str, str]:
    """Type of every pointer."""
    ids = dict.fromkeys(("draft_ptr", "chosen_ptr", "emitted_ptr", "next_token_ptr"), "*i64")
    return ids | dict.fromkeys(("accepted_ptr", "accepted_rows_ptr"), "*i32")
