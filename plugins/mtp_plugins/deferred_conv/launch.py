"""Sizes and parameter types of a launch of the DeferredConv kernel."""

from __future__ import annotations

from mtp_plugins.triton_kernels.launch import Launch, blocks, pointers, power_of_two

CHANNEL_BLOCK = 128
NUM_WARPS = 4


def launch(
    *, batch: int, rows: int, staged_rows: int, channels: int, taps: int, channel_block: int = CHANNEL_BLOCK
) -> Launch:
    """Grid and constants for these sizes; `channel_block` is a power of two and need not divide `channels`."""
    return Launch(
        grid=(blocks(channels, channel_block), batch, 1),
        scalars={"rows": rows},
        constexprs={
            "staged_rows": staged_rows,
            "channels": channels,
            "taps": taps,
            "tap_block": power_of_two(taps - 1),
            "channel_block": channel_block,
        },
        num_warps=NUM_WARPS,
    )


def signature(element: str, state: str = "fp32") -> dict[str, str]:
    """Type of every parameter, with the raw rows, the weight and the output in `element` ("fp32", "bf16", "fp16")."""
    short = pointers(element, "x", "weight", "staged_x", "output", "next_x")
    states = pointers(state, "past_state", "present_state")
    return short | states | pointers("i32", "accepted_rows", "kept_rows") | {"rows": "i32"}
