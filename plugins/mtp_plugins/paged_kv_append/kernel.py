"""PagedKvAppend on a GPU: one program copies one row of keys and of values."""
# mypy: ignore-errors
# The body of a kernel is Triton's language, which has no types.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "max_pages"])
def paged_kv_append(
    key_ptr,
    value_ptr,
    past_key_pages_ptr,
    past_value_pages_ptr,
    block_table_ptr,
    lengths_ptr,
    rows,
    max_pages,
    present_key_pages_ptr,
    present_value_pages_ptr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """See `OPERATOR` for shapes; width is num_kv_heads * head_dim.

    The pages come in twice, as input and as output of a plugin, and are one buffer: only the output is written.
    """
    row, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(lengths_ptr + sequence) + row
    column = position // page_size
    inside = (position >= 0) & (column < max_pages)
    # int64: a pool of pages passes 2 ** 31 elements.
    page = tl.load(block_table_ptr + sequence * max_pages + column, mask=inside, other=-1).to(tl.int64)
    element = tl.arange(0, block)
    mask = (element < width) & (page >= 0)
    source = (sequence * rows + row) * width + element
    target = (page * page_size + position % page_size) * width + element
    tl.store(present_key_pages_ptr + target, tl.load(key_ptr + source, mask=mask), mask=mask)
    tl.store(present_value_pages_ptr + target, tl.load(value_ptr + source, mask=mask), mask=mask)
