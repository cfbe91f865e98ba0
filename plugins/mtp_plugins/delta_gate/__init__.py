"""DeltaGate: decay and update rate of a gated delta layer from their two projections."""

from mtp_plugins.delta_gate.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="DeltaGate",
    inputs=("a", "b", "dt_bias", "a_log"),
    outputs=("decay", "beta"),
    body=body,
)
"""Inputs: a, b float32[batch, rows, num_value_heads]; dt_bias, a_log float32[num_value_heads].
Outputs: decay = -exp(a_log) softplus(a + dt_bias), in log space; beta = sigmoid(b)."""
