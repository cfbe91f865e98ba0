"""DeferredDelta on a GPU: one program for each sequence, value head and block of value dimensions.

A program holds its part of the state in registers from one read to one write, whatever the number of rows; rows that
are not kept change only the copy in registers. The arithmetic is that of `gated_delta.reference`, in float32.

present_state may be past_state itself. The next_* buffers may not be the staged_* buffers: the value heads of one
key head, and the blocks of one value head, read the same staged rows at different times.
"""
# mypy: ignore-errors
# The body of a kernel is Triton's language, which has no types.

import triton
import triton.language as tl

_EPSILON = tl.constexpr(1e-6)  # gated_delta.reference.L2_EPSILON; a kernel cannot read a plain global.


# `while`: the interpreter of Triton 3.6 cannot take a bound that is not a constant in `range`.
@triton.jit(do_not_specialize=["rows"])
def deferred_delta(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, past_state_ptr, staged_key_ptr, staged_value_ptr,
    staged_decay_ptr, staged_beta_ptr, accepted_rows_ptr, kept_rows_ptr,
    rows,
    output_ptr, present_state_ptr, next_key_ptr, next_value_ptr, next_decay_ptr, next_beta_ptr,
    staged_rows: tl.constexpr, key_heads: tl.constexpr, value_heads: tl.constexpr,
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

    state = _commit(
        state, staged_key_ptr, staged_value_ptr, staged_decay_ptr, staged_beta_ptr, sequence * staged_rows,
        tl.minimum(tl.load(accepted_rows_ptr + sequence), staged_rows),
        key_head, head, k, v, in_key, in_value, key_heads, value_heads, key_dim, value_dim,
    )  # fmt: skip

    i = 0
    # The same text twice: the rows that are kept, and the others behind the one write of the state.
    for phase in tl.static_range(2):
        end = tl.minimum(tl.load(kept_rows_ptr + sequence), rows) if phase == 0 else rows
        while i < end:
            key_at, value_at, head_at = _places(
                sequence * rows + i, key_head, head, k, v, key_heads, value_heads, key_dim, value_dim
            )
            key, value, decay, beta = _load(
                key_ptr, value_ptr, decay_ptr, beta_ptr, key_at, value_at, head_at, in_key, in_value
            )
            key = _unit(key.to(tl.float32))
            query = _unit(tl.load(query_ptr + key_at, mask=in_key, other=0.0).to(tl.float32)) * key_dim**-0.5
            state = _row(state, key, value.to(tl.float32), decay, beta)
            tl.store(output_ptr + value_at, tl.sum(state * query[:, None], axis=0), mask=in_value)
            _stage(
                next_key_ptr, next_value_ptr, next_decay_ptr, next_beta_ptr, key, value, decay, beta,
                sequence * staged_rows + i, i < staged_rows, block == 0, key_head, head, k, v, in_key, in_value,
                key_heads, value_heads, key_dim, value_dim,
            )  # fmt: skip
            i += 1
        if phase == 0:
            # In place, a cell that several threads hold must be read by all of them before one writes it.
            tl.debug_barrier()
            tl.store(present_state_ptr + cell, state, mask=in_cell)


@triton.jit
def _commit(
    state, key_ptr, value_ptr, decay_ptr, beta_ptr, first, count, key_head, head, k, v, in_key, in_value,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
):  # fmt: skip
    """The state after `count` staged rows, of which row `first` is the first."""
    i = 0
    while i < count:
        key_at, value_at, head_at = _places(first + i, key_head, head, k, v, key_heads, value_heads, key_dim, value_dim)
        key, value, decay, beta = _load(
            key_ptr, value_ptr, decay_ptr, beta_ptr, key_at, value_at, head_at, in_key, in_value
        )
        state = _row(state, key, value.to(tl.float32), decay, beta)
        i += 1
    return state


@triton.jit
def _stage(
    key_ptr, value_ptr, decay_ptr, beta_ptr, key, value, decay, beta,
    row, has_room, is_first_block, key_head, head, k, v, in_key, in_value,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
):  # fmt: skip
    """Leave the factors of a row for the next call, if there is room; one program stores what several share."""
    key_at, value_at, head_at = _places(row, key_head, head, k, v, key_heads, value_heads, key_dim, value_dim)
    shared = has_room & is_first_block
    is_first_head = head % (value_heads // key_heads) == 0
    tl.store(key_ptr + key_at, key, mask=in_key & shared & is_first_head)
    tl.store(value_ptr + value_at, value, mask=in_value & has_room)
    tl.store(decay_ptr + head_at, decay, mask=shared)
    tl.store(beta_ptr + head_at, beta, mask=shared)


@triton.jit
def _places(
    row, key_head, head, k, v,
    key_heads: tl.constexpr, value_heads: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr,
):  # fmt: skip
    """Where the key of a row lies, its value and its decay."""
    head_at = row * value_heads + head
    return (row * key_heads + key_head) * key_dim + k, head_at * value_dim + v, head_at


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
