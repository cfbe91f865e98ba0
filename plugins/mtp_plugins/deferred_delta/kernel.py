"""DeferredDelta on a GPU: one program for each sequence, value head and block of value dimensions.

A program holds its part of the state in registers from one read to one write, whatever the number of rows; the
new rows change only the copy in registers. The arithmetic is that of `gated_delta.reference`, in float32.

present_state may be past_state itself. The next_* buffers may not be the staged_* buffers: the value heads of one
key head, and the blocks of one value head, read the same staged rows at different times.
"""
# mypy: ignore-errors
# The body of a kernel is Triton's language, which has no types.

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-6)  # gated_delta.reference.L2_EPSILON; a kernel cannot read a plain global.


@triton.jit
def deferred_delta(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, past_state_ptr,
    staged_key_ptr, staged_value_ptr, staged_decay_ptr, staged_beta_ptr, accepted_rows_ptr,
    output_ptr, present_state_ptr, next_key_ptr, next_value_ptr, next_decay_ptr, next_beta_ptr,
    rows: tl.constexpr, staged_rows: tl.constexpr, key_heads: tl.constexpr, value_heads: tl.constexpr,
    key_dim: tl.constexpr, value_dim: tl.constexpr, key_block: tl.constexpr, value_block: tl.constexpr,
):  # fmt: skip
    """See `OPERATOR` for shapes."""
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head // (value_heads // key_heads)
    k = tl.arange(0, key_block)
    v = block * value_block + tl.arange(0, value_block)
    in_key, in_value = k < key_dim, v < value_dim
    cell = ((sequence * value_heads + head) * key_dim + k[:, None]) * value_dim + v[None, :]
    in_cell = in_key[:, None] & in_value[None, :]
    state = tl.load(past_state_ptr + cell, mask=in_cell, other=0.0)

    accepted = tl.load(accepted_rows_ptr + sequence)
    for i in range(staged_rows):
        if i < accepted:
            row = sequence * staged_rows + i
            key_at, head_at = (row * key_heads + key_head) * key_dim + k, row * value_heads + head
            key, value, decay, beta = _load(
                staged_key_ptr, staged_value_ptr, staged_decay_ptr, staged_beta_ptr,
                key_at, head_at * value_dim + v, head_at, in_key, in_value,
            )  # fmt: skip
            state = _row(state, key, value.to(tl.float32), decay, beta)
    # In place, a cell that several threads hold must be read by all of them before one writes it.
    tl.debug_barrier()
    tl.store(present_state_ptr + cell, state, mask=in_cell)

    # One program stores what several share.
    first_block = block == 0
    first_head = first_block & (head % (value_heads // key_heads) == 0)
    for i in range(rows):
        row = sequence * rows + i
        key_at, head_at = (row * key_heads + key_head) * key_dim + k, row * value_heads + head
        value_at = head_at * value_dim + v
        key, value, decay, beta = _load(
            key_ptr, value_ptr, decay_ptr, beta_ptr, key_at, value_at, head_at, in_key, in_value
        )
        key = _unit(key.to(tl.float32))
        query = _unit(tl.load(query_ptr + key_at, mask=in_key, other=0.0).to(tl.float32)) * key_dim**-0.5
        state = _row(state, key, value.to(tl.float32), decay, beta)
        tl.store(output_ptr + value_at, tl.sum(state * query[:, None], axis=0), mask=in_value)
        tl.store(next_key_ptr + key_at, key, mask=in_key & first_head)
        tl.store(next_value_ptr + value_at, value, mask=in_value)
        tl.store(next_decay_ptr + head_at, decay, mask=first_block)
        tl.store(next_beta_ptr + head_at, beta, mask=first_block)


@triton.jit
def _load(key_ptr, value_ptr, decay_ptr, beta_ptr, key_at, value_at, head_at, in_key, in_value):
    """Key, value, decay and beta of one row, the first two as they are stored."""
    key = tl.load(key_ptr + key_at, mask=in_key, other=0.0)
    value = tl.load(value_ptr + value_at, mask=in_value, other=0.0)
    return key, value, tl.load(decay_ptr + head_at), tl.load(beta_ptr + head_at)


@triton.jit
def _row(state, key, value, decay, beta):
    """One row of the gated delta rule on float32[key_block, value_block]; key is of unit length."""
    faded = state * tl.exp(decay)
    read = tl.sum(faded * key[:, None], axis=0)
    delta = (value - read) * beta
    return tl.fma(key[:, None], delta[None, :], faded)


@triton.jit
def _unit(x):
    """x * rsqrt(sum x^2 + epsilon) of one head, float32[key_block]; lanes behind key_dim hold 0."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + _EPSILON)
