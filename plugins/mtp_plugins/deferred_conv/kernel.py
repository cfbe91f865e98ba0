"""DeferredConv on a GPU: one program for each sequence and block of channels, arithmetic in float32."""
# mypy: ignore-errors
# The body of a kernel is Triton's language, which has no types.

import triton
import triton.language as tl


@triton.jit
def deferred_conv(
    x_ptr,
    weight_ptr,
    past_state_ptr,
    staged_x_ptr,
    accepted_rows_ptr,
    output_ptr,
    present_state_ptr,
    next_x_ptr,
    rows: tl.constexpr,
    staged_rows: tl.constexpr,
    channels: tl.constexpr,
    taps: tl.constexpr,
    tap_block: tl.constexpr,
    channel_block: tl.constexpr,
):
    """See `OPERATOR` for shapes; present_state may be past_state itself."""
    sequence = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * channel_block + tl.arange(0, channel_block)
    in_channel = c < channels
    accepted = tl.load(accepted_rows_ptr + sequence)
    past = past_state_ptr + sequence * (taps - 1) * channels
    staged = staged_x_ptr + sequence * staged_rows * channels
    x = x_ptr + sequence * rows * channels
    output = output_ptr + sequence * rows * channels
    next_x = next_x_ptr + sequence * rows * channels
    # Unrolled, so that each tap knows whether it is in front of the new rows.
    for i in tl.static_range(rows):
        total = tl.zeros((channel_block,), tl.float32)
        for j in tl.static_range(taps):
            if i + j < taps - 1:
                raw = _old_row(past, staged, accepted, i + j, c, in_channel, channels, taps)
            else:
                raw = tl.load(x + (i + j - (taps - 1)) * channels + c, mask=in_channel, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + c * taps + j, mask=in_channel, other=0.0).to(tl.float32)
            total = tl.fma(weight, raw, total)
        tl.store(output + i * channels + c, total * tl.sigmoid(total), mask=in_channel)
        tl.store(next_x + i * channels + c, tl.load(x + i * channels + c, mask=in_channel, other=0.0), mask=in_channel)

    # All of them in one tensor: in place, every row must be read before one is written.
    tap = tl.arange(0, tap_block)[:, None]
    in_state = (tap < taps - 1) & in_channel[None, :]
    committed = _old_row(past, staged, accepted, tap, c[None, :], in_state, channels, taps)
    tl.debug_barrier()
    place = (sequence * (taps - 1) + tap) * channels + c[None, :]
    tl.store(present_state_ptr + place, committed, mask=in_state)


@triton.jit
def _old_row(past, staged, accepted, row, c, mask, channels: tl.constexpr, taps: tl.constexpr):
    """Row 0..taps-2 of the committed state, float32: one of the state before, or a staged one behind it."""
    at = row + accepted
    in_past = at < taps - 1
    old = tl.load(past + at * channels + c, mask=mask & in_past, other=0.0).to(tl.float32)
    new = tl.load(staged + (at - (taps - 1)) * channels + c, mask=mask & (at >= taps - 1), other=0.0).to(tl.float32)
    return tl.where(in_past, old, new)
