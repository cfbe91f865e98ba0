"""PagedAttention: causal grouped-query attention of new rows over pages that hold them already."""

from mtp_plugins.operator import Operator
from mtp_plugins.paged_attention.body import body

OPERATOR = Operator(
    name="PagedAttention",
    inputs=("query", "key_pages", "value_pages", "block_table", "lengths"),
    outputs=("output",),
    body=body,
    attributes=("scale",),
)
"""Inputs: query T[batch, rows, num_heads * head_dim], normed and rotated already; key_pages, value_pages
T[pages, page_size, num_kv_heads, head_dim], after `PagedKvAppend` has written the new rows; block_table
int32[batch, max_pages]; lengths int32[batch], the rows committed before those. T is float32, float16 or
bfloat16. Output: like query; row m stands at position lengths + m and sees the positions up to its own.
Scores are scaled by `scale`, head_dim ** -0.5 if the node has none. Positions from lengths + rows on and
columns of the table that hold only such positions are never read, so taking rows back means passing a
smaller length; pages may be shared between sequences. A negative number in the table stands for a page of
zeros, so that padding behind the rows of a short sequence reads nothing foreign; its output means nothing.

Two kernels compute it, the second from what the first leaves. In order, inputs, integers and outputs are their
parameters: query, key_pages, value_pages, block_table, lengths, rows, max_pages -> partial_max, partial_sum,
partial_output; then partial_max, partial_sum, partial_output, lengths, rows, splits -> output."""
