"""RoutedExperts: each row through the gated MLPs that a router chose for it, summed by weight."""

from mtp_plugins.operator import Operator
from mtp_plugins.routed_experts.body import body

OPERATOR = Operator(
    name="RoutedExperts",
    inputs=("x", "expert_ids", "expert_weights", "gate_up", "down"),
    outputs=("output",),
    body=body,
)
"""Inputs: x float32[batch, rows, hidden]; expert_ids int64[batch, rows, top_k], distinct in a row;
expert_weights float32[batch, rows, top_k]; gate_up float32[experts, 2 * intermediate, hidden], gate rows
first; down float32[experts, hidden, intermediate]. Output: float32[batch, rows, hidden], the sum over a
row's experts of weight * down(silu(gate(x)) * up(x))."""
