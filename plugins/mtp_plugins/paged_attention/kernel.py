# ruff: noqa: N803 - compile-time arguments are in capitals, as in Triton's own kernels
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""PagedAttention as two Triton kernels: partial results of splits of the sequence, and their combination.

Arguments are inputs, integers, outputs, as a plugin of TensorRT passes them.

A row's bits must not depend on how many rows the call has, on the batch, on the pages or on what lies behind the row.
Therefore a program has one query row, and M decides only which; splits begin at multiples of SPLIT tokens counted
from the start of the sequence; a tile behind the row's position changes nothing (a factor of one, a sum of zeros);
and the combination reads a row's splits in order of position. Rows of a verify packed into one tile would read the
pages less often from the second-level cache, but would stand elsewhere in the tile than a row that is decoded alone,
and matrix products may round by place.
"""

# Annotations must stay objects: Triton's interpreter compares them, so no `from __future__ import annotations`.
import triton
import triton.language as tl


@triton.jit
def partial_kernel(
    query,
    key_pages,
    value_pages,
    block_table,
    lengths,
    max_pages,
    partial_max,
    partial_sum,
    partial_output,
    M: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program: one query row, the GROUP heads that share a key head, one split."""
    row = tl.program_id(0)
    sequence = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    end = tl.minimum(tl.load(lengths + sequence) + row + 1, max_pages * PAGE_SIZE)  # Never behind the table.
    if split * SPLIT >= end:
        return
    head = tl.arange(0, BLOCK_Q)
    place = ((sequence * M + row) * KV_HEADS + kv_head) * GROUP + head
    element = tl.arange(0, BLOCK_D)
    mask = (head < GROUP)[:, None] & (element < HEAD_DIM)[None, :]
    q = tl.load(query + place[:, None] * HEAD_DIM + element[None, :], mask=mask, other=0.0)
    top = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    output = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for tile in range(0, SPLIT, BLOCK_N):
        key = split * SPLIT + tile + tl.arange(0, BLOCK_N)
        page = tl.load(block_table + sequence * max_pages + key // PAGE_SIZE, mask=key < end, other=0).to(tl.int64)
        offset = ((page * PAGE_SIZE + key % PAGE_SIZE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + element[None, :]
        stored = (key < end)[:, None] & (element < HEAD_DIM)[None, :]
        k = tl.load(key_pages + offset, mask=stored, other=0.0)
        v = tl.load(value_pages + offset, mask=stored, other=0.0)
        top, total, output = attend_tile(q, k, v, key < end, top, total, output, LOG2_SCALE, WIDEN)
    target = place.to(tl.int64) * tl.num_programs(2) + split
    tl.store(partial_max + target, top, mask=head < GROUP)
    tl.store(partial_sum + target, total, mask=head < GROUP)
    tl.store(partial_output + target[:, None] * HEAD_DIM + element[None, :], output, mask=mask)


@triton.jit
def attend_tile(q, k, v, visible, top, total, output, LOG2_SCALE: tl.constexpr, WIDEN: tl.constexpr):
    """The running maximum, sum and output of the heads after one more tile of keys, in base 2.

    The first tile of a split has a visible key, so that the maximum is finite. WIDEN multiplies in float32.
    """
    dtype = v.dtype
    if WIDEN:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * LOG2_SCALE
    scores = tl.where(visible[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    factor = tl.exp2(top - new_top)
    total = total * factor + tl.sum(weights, 1)
    output = tl.dot(weights.to(dtype).to(v.dtype), v, acc=output * factor[:, None], input_precision="ieee")
    return new_top, total, output


@triton.jit
def combine_kernel(
    partial_max,
    partial_sum,
    partial_output,
    lengths,
    splits,
    output,
    M: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program: one head of one query row, over its splits in blocks of BLOCK_S."""
    place = tl.program_id(0)
    position = tl.load(lengths + place // (M * HEADS)) + place // HEADS % M
    count = tl.minimum(position // SPLIT + 1, splits)
    element = tl.arange(0, BLOCK_D)
    top = tl.max(tl.full([BLOCK_S], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([BLOCK_S], tl.float32), 0)
    result = tl.zeros([BLOCK_D], tl.float32)
    first = 0
    # `while`: the interpreter of Triton 3.6 cannot take a bound that is not a constant in `range`.
    while first < count:
        split = first + tl.arange(0, BLOCK_S)
        source = place.to(tl.int64) * splits + split
        tops = tl.load(partial_max + source, mask=split < count, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tops, 0))
        weights = tl.exp2(tops - new_top)
        factor = tl.exp2(top - new_top)
        sums = tl.load(partial_sum + source, mask=split < count, other=0.0)
        mask = (split < count)[:, None] & (element < HEAD_DIM)[None, :]
        parts = tl.load(partial_output + source[:, None] * HEAD_DIM + element[None, :], mask=mask, other=0.0)
        total = total * factor + tl.sum(weights * sums, 0)
        result = result * factor + tl.sum(weights[:, None] * parts, 0)
        top = new_top
        first += BLOCK_S
    row = (result / total).to(output.dtype.element_ty)
    tl.store(output + place * HEAD_DIM + element, row, mask=element < HEAD_DIM)
