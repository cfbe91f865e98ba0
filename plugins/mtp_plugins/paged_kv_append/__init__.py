"""PagedKvAppend: writes the new key and value rows of every sequence into its pages."""

from mtp_plugins.operator import Operator
from mtp_plugins.paged_kv_append.body import body

OPERATOR = Operator(
    name="PagedKvAppend",
    inputs=("key", "value", "past_key_pages", "past_value_pages", "block_table", "lengths"),
    outputs=("present_key_pages", "present_value_pages"),
    body=body,
)
"""Inputs: key, value T[batch, rows, num_kv_heads * head_dim], normed and rotated already; past_key_pages,
past_value_pages T[pages, page_size, num_kv_heads, head_dim], page_size a power of two; block_table
int32[batch, max_pages], the page that holds positions i * page_size .. (i + 1) * page_size - 1 of a sequence
in column i; lengths int32[batch], the rows committed before this call. T is float32, float16 or bfloat16.
Outputs: the pages with the new rows at positions lengths .. lengths + rows - 1, the same buffers where a
backend can. A row whose column holds a negative number, or lies behind the table, is not written: padding behind
the rows of a short sequence needs no page. Columns that no row needs may hold anything. The caller sees to it that
no two sequences share a page into which one of them writes.

In order, inputs, the integers rows and max_pages, and outputs are the parameters of the kernel."""
