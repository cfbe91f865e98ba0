"""CachedAttention: causal grouped-query attention of new rows over a cache with a committed length."""

from mtp_plugins.cached_attention.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="CachedAttention",
    inputs=("query", "key", "value", "past_key", "past_value", "past_length"),
    outputs=("output", "present_key", "present_value"),
    body=body,
    attributes=("num_heads", "num_kv_heads"),
)
"""Inputs: query float32[batch, rows, num_heads * head_dim]; key, value
float32[batch, rows, num_kv_heads * head_dim], all normed and rotated already; past_key, past_value
float32[batch, num_kv_heads, capacity, head_dim]; past_length int64[batch], the committed rows.
Outputs: output like query, scores scaled by head_dim ** -0.5; the caches with the new rows at
past_length .. past_length + rows - 1 (the same buffers where a backend can). Rows at or beyond
past_length are never read, so taking rows back means passing a smaller length."""
