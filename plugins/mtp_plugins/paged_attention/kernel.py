"""PagedAttention on a GPU as two kernels: partial results of splits of the sequence, and their combination.

A row's bits must not depend on how many rows the call has, on the batch, on the pages or on what lies behind the row.
Therefore a program has one query row, and `rows` decides only which; splits begin at multiples of `split_size` tokens
counted from the start of the sequence; a tile behind the row's position changes nothing (a factor of one, a sum of
zeros); and the combination reads a row's splits in order of position. Rows of a verify packed into one tile would read
the pages less often from the second-level cache, but would stand elsewhere in the tile than a row that is decoded
alone, and matrix products may round by place.
"""
# mypy: ignore-errors
# The body of a kernel is Triton's language, which has no types.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "max_pages"])
def paged_attention_partial(
    query_ptr, key_pages_ptr, value_pages_ptr, block_table_ptr, lengths_ptr,
    rows, max_pages,
    partial_max_ptr, partial_sum_ptr, partial_output_ptr,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, page_size: tl.constexpr,
    log2_scale: tl.constexpr, split_size: tl.constexpr,
    head_block: tl.constexpr, key_block: tl.constexpr, dim_block: tl.constexpr, widen: tl.constexpr,
):  # fmt: skip
    """One program: one query row, the `group` heads that share a key head, one split."""
    row = tl.program_id(0)
    sequence = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = tl.program_id(1) % kv_heads
    split = tl.program_id(2)
    end = tl.minimum(tl.load(lengths_ptr + sequence) + row + 1, max_pages * page_size)  # Never behind the table.
    if split * split_size >= end:
        return
    head = tl.arange(0, head_block)
    place = ((sequence * rows + row) * kv_heads + kv_head) * group + head
    element = tl.arange(0, dim_block)
    mask = (head < group)[:, None] & (element < head_dim)[None, :]
    q = tl.load(query_ptr + place[:, None] * head_dim + element[None, :], mask=mask, other=0.0)
    top = tl.full([head_block], float("-inf"), tl.float32)
    total = tl.zeros([head_block], tl.float32)
    output = tl.zeros([head_block, dim_block], tl.float32)
    for tile in range(0, split_size, key_block):
        key = split * split_size + tile + tl.arange(0, key_block)
        page = tl.load(block_table_ptr + sequence * max_pages + key // page_size, mask=key < end, other=-1).to(tl.int64)
        offset = ((page * page_size + key % page_size) * kv_heads + kv_head)[:, None] * head_dim + element[None, :]
        stored = (page >= 0)[:, None] & (element < head_dim)[None, :]
        k = tl.load(key_pages_ptr + offset, mask=stored, other=0.0)
        v = tl.load(value_pages_ptr + offset, mask=stored, other=0.0)
        top, total, output = _attend_tile(q, k, v, key < end, top, total, output, log2_scale, widen)
    target = place * tl.num_programs(2) + split
    tl.store(partial_max_ptr + target, top, mask=head < group)
    tl.store(partial_sum_ptr + target, total, mask=head < group)
    tl.store(partial_output_ptr + target[:, None] * head_dim + element[None, :], output, mask=mask)


@triton.jit
def _attend_tile(q, k, v, visible, top, total, output, log2_scale: tl.constexpr, widen: tl.constexpr):
    """The running maximum, sum and output of the heads after one more tile of keys, in base 2.

    The first tile of a split has a visible key, so that the maximum is finite. `widen` multiplies in float32: Triton's
    interpreter would multiply the bits of bfloat16.
    """
    dtype = v.dtype
    if widen:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * log2_scale
    scores = tl.where(visible[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    factor = tl.exp2(top - new_top)
    total = tl.fma(total, factor, tl.sum(weights, 1))
    output = tl.dot(weights.to(dtype).to(v.dtype), v, acc=output * factor[:, None], input_precision="ieee")
    return new_top, total, output


@triton.jit(do_not_specialize=["rows", "splits"])
def paged_attention_combine(
    partial_max_ptr, partial_sum_ptr, partial_output_ptr, lengths_ptr,
    rows, splits,
    output_ptr,
    heads: tl.constexpr, head_dim: tl.constexpr, split_size: tl.constexpr,
    splits_block: tl.constexpr, dim_block: tl.constexpr,
):  # fmt: skip
    """One program: one head of one query row, over its splits in blocks of `splits_block`."""
    head, row, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = (sequence * rows + row) * heads + head
    position = tl.load(lengths_ptr + sequence) + row
    count = tl.minimum(position // split_size + 1, splits)
    element = tl.arange(0, dim_block)
    top = tl.max(tl.full([splits_block], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([splits_block], tl.float32), 0)
    result = tl.zeros([dim_block], tl.float32)
    first = 0
    # `while`: the interpreter of Triton 3.6 cannot take a bound that is not a constant in `range`.
    while first < count:
        split = first + tl.arange(0, splits_block)
        source = place * splits + split
        tops = tl.load(partial_max_ptr + source, mask=split < count, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(tops, 0))
        weights = tl.exp2(tops - new_top)
        factor = tl.exp2(top - new_top)
        sums = tl.load(partial_sum_ptr + source, mask=split < count, other=0.0)
        mask = (split < count)[:, None] & (element < head_dim)[None, :]
        parts = tl.load(partial_output_ptr + source[:, None] * head_dim + element[None, :], mask=mask, other=0.0)
        total = tl.fma(total, factor, tl.sum(weights * sums, 0))
        result = tl.fma(result, factor, tl.sum(weights[:, None] * parts, 0))
        top = new_top
        first += splits_block
    output = (result / total).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + place * head_dim + element, output, mask=element < head_dim)
