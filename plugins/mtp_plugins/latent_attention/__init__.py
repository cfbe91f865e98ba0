"""LatentAttention: causal attention of many query heads over one compressed row a token."""

from mtp_plugins.latent_attention.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="LatentAttention",
    inputs=("query", "rows", "past", "past_length"),
    outputs=("output", "present"),
    body=body,
    attributes=("num_heads",),
)
"""Inputs: query float32[batch, rows, num_heads * row_width]; rows float32[batch, rows, row_width], the new
rows of the cache; past float32[batch, 1, capacity, row_width]; past_length int64[batch], the committed
rows. A cache row is key and value at once. Outputs: output like query, scores scaled by
row_width ** -0.5; the cache with the new rows at past_length .. past_length + rows - 1 (the same buffer
where a backend can). Rows at or beyond past_length are never read."""
