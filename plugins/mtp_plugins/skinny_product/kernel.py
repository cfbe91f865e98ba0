"""SkinnyProduct on a GPU: one program for each tile of rows and block of outputs.

The reduction runs over blocks of fixed size in the order of `in`, in one program, whatever the number of rows: nothing
is split over programs that another number of rows would split otherwise.
"""
# mypy: ignore-errors
# The body of a kernel is Triton's language, which has no types.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def skinny_product(
    x_ptr,
    weight_ptr,
    rows,
    output_ptr,
    width_in: tl.constexpr,
    width_out: tl.constexpr,
    row_block: tl.constexpr,
    in_block: tl.constexpr,
    out_block: tl.constexpr,
    widen: tl.constexpr,
):
    """See `OPERATOR` for shapes; `widen` multiplies in float32, as the interpreter would multiply bits of bfloat16."""
    row = tl.program_id(0).to(tl.int64) * row_block + tl.arange(0, row_block)
    column = tl.program_id(1).to(tl.int64) * out_block + tl.arange(0, out_block)
    total = tl.zeros([row_block, out_block], tl.float32)
    for first in range(0, width_in, in_block):
        i = first + tl.arange(0, in_block)
        in_x = (row < rows)[:, None] & (i < width_in)[None, :]
        in_weight = (column < width_out)[:, None] & (i < width_in)[None, :]
        x = tl.load(x_ptr + row[:, None] * width_in + i[None, :], mask=in_x, other=0.0)
        weight = tl.load(weight_ptr + column[:, None] * width_in + i[None, :], mask=in_weight, other=0.0)
        if widen:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        total = tl.dot(x, tl.trans(weight), acc=total, input_precision="ieee")
    inside = (row < rows)[:, None] & (column < width_out)[None, :]
    place = row[:, None] * width_out + column[None, :]
    tl.store(output_ptr + place, total.to(output_ptr.dtype.element_ty), mask=inside)
