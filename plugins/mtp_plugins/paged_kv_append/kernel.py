# ruff: noqa: N803 - compile-time arguments are in capitals, as in Triton's own kernels
# mypy: disable-error-code="import-untyped, import-not-found, no-untyped-def, untyped-decorator"
"""PagedKvAppend as a Triton kernel. Arguments are inputs, integers, outputs, as a plugin of TensorRT passes them."""

# Annotations must stay objects: Triton's interpreter compares them, so no `from __future__ import annotations`.
import triton
import triton.language as tl


@triton.jit
def append_kernel(
    key,
    value,
    past_key_pages,
    past_value_pages,
    block_table,
    lengths,
    max_pages,
    present_key_pages,
    present_value_pages,
    M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program copies one row, WIDTH = num_kv_heads * head_dim elements, of keys and of values.

    The pages come in twice, as input and as output of a plugin, and are one buffer: only the output is written.
    A row behind the table's last column is not written, so that a wrong length cannot touch foreign memory.
    """
    program = tl.program_id(0)
    sequence = program // M
    position = tl.load(lengths + sequence) + program % M
    column = position // PAGE_SIZE
    inside = (position >= 0) & (column < max_pages)
    # int64: a pool of pages passes 2 ** 31 elements.
    page = tl.load(block_table + sequence * max_pages + column, mask=inside, other=0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    mask = (element < WIDTH) & inside
    source = program * WIDTH + element
    target = (page * PAGE_SIZE + position % PAGE_SIZE) * WIDTH + element
    tl.store(present_key_pages + target, tl.load(key + source, mask=mask), mask=mask)
    tl.store(present_value_pages + target, tl.load(value + source, mask=mask), mask=mask)
