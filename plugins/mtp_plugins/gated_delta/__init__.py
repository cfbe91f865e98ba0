"""GatedDelta: rows of the gated delta rule, computed one after another from a committed state."""

from mtp_plugins.gated_delta.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="GatedDelta",
    inputs=("query", "key", "value", "decay", "beta", "past_state"),
    outputs=("output", "present_state", "unit_key"),
    body=body,
    attributes=("num_key_heads", "num_value_heads"),
)
"""Inputs: query, key float32[batch, rows, num_key_heads * key_dim], not yet normalised;
value float32[batch, rows, num_value_heads * value_dim]; decay (log space, <= 0) and beta
float32[batch, rows, num_value_heads]; past_state float32[batch, num_value_heads, key_dim, value_dim].
Outputs: output like value; present_state after the last row; unit_key, the L2-normalised key, which
with value, decay and beta is all that a later commit needs to repeat a row."""
