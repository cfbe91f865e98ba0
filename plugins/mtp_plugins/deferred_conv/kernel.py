"""DeferredConv on a GPU: one program for each sequence and block of channels, arithmetic in float32.

Rows of one sequence are no programs of their own: in place, the state may be written when all of them have read it.
"""
# mypy: ignore-errors
# The body of a kernel is Triton's language, which has no types.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def deferred_conv(
    x_ptr,
    weight_ptr,
    past_state_ptr,
    staged_x_ptr,
    accepted_rows_ptr,
    kept_rows_ptr,
    rows,
    output_ptr,
    present_state_ptr,
    next_x_ptr,
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
    accepted = tl.minimum(tl.load(accepted_rows_ptr + sequence), staged_rows)
    kept = tl.minimum(tl.load(kept_rows_ptr + sequence), rows)
    past = past_state_ptr + sequence * (taps - 1) * channels
    staged = staged_x_ptr + sequence * staged_rows * channels
    x = x_ptr + sequence * rows * channels
    output = output_ptr + sequence * rows * channels
    next_x = next_x_ptr + sequence * staged_rows * channels
    i = 0
    # `while`: the interpreter of Triton 3.6 cannot take a bound that is not a constant in `range`.
    while i < rows:
        total = tl.zeros((channel_block,), tl.float32)
        for j in tl.static_range(taps):
            raw = _raw(past, staged, x, accepted, accepted + i + j, c, in_channel, channels, taps)
            weight = tl.load(weight_ptr + c * taps + j, mask=in_channel, other=0.0).to(tl.float32)
            total = tl.fma(weight, raw, total)
        tl.store(output + i * channels + c, total * tl.sigmoid(total), mask=in_channel)
        new = tl.load(x + i * channels + c, mask=in_channel, other=0.0)
        tl.store(next_x + i * channels + c, new, mask=in_channel & (i < staged_rows))
        i += 1

    # All of them in one tensor: in place, every row must be read before one is written.
    tap = tl.arange(0, tap_block)[:, None]
    in_state = (tap < taps - 1) & in_channel[None, :]
    committed = _raw(past, staged, x, accepted, accepted + kept + tap, c[None, :], in_state, channels, taps)
    tl.debug_barrier()
    place = (sequence * (taps - 1) + tap) * channels + c[None, :]
    tl.store(present_state_ptr + place, committed, mask=in_state)


@triton.jit
def _raw(past, staged, x, accepted, at, c, mask, channels: tl.constexpr, taps: tl.constexpr):
    """Raw row `at` of the state before, the accepted staged rows behind it and the new ones behind those, float32."""
    staged_at = at - (taps - 1)
    new_at = staged_at - accepted
    in_staged = (staged_at >= 0) & (new_at < 0)
    old = tl.load(past + at * channels + c, mask=mask & (staged_at < 0), other=0.0).to(tl.float32)
    kept = tl.load(staged + staged_at * channels + c, mask=mask & in_staged, other=0.0).to(tl.float32)
    new = tl.load(x + new_at * channels + c, mask=mask & (new_at >= 0), other=0.0).to(tl.float32)
    return tl.where(staged_at < 0, old, tl.where(in_staged, kept, new))
