"""Sizes and parameter types of a launch of the DeferredConv kernel."""

from __future__ import annotations

from mtp_plugins.triton_kernels.launch import Launch, power_of_two

CHANNEL_BLOCK = 128
NUM_WARPS = 4


def launch(
    *, batch: int, rows: int, staged_rows: int, channels: int, taps: int, channel_block: int = CHANNEL_BLOCK
) -> Launch:
    """Grid and constants for these sizes; `channel_block` is a power of two and need not divide `channels`."""
    return Launch(
        grid=(-(-channels // channel_block), batch, 1),
        constexprs={
            "rows": rows,
            "staged_rows": staged_rows,
            "channels": channels,
            "taps": taps,
            "tap_block": power_of_two(taps - 1),
            "channel_block": channel_block,
        },
        num_warps=NUM_WARPS,
    )


def signature(element: str, state: str = "fp32") -> dict[str, str]:
    """Type of every pointer, with the raw rows, the weight and the output in `element` ("fp32", "bf16", "fp16")."""
    short = dict.fromkeys(("x_ptr", "weight_ptr", "staged_x_ptr", "output_ptr", "next_x_ptr"), f"*{element}")
    states = dict.fromkeys(("past_state_ptr", "present_state_ptr"), f"*{state}")
    return short | states | {"accepted_rows_ptr": "*i32"}
