"""CausalConvState: depthwise causal convolution over rows, with the last raw rows as its state."""

from mtp_plugins.causal_conv_state.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="CausalConvState",
    inputs=("x", "weight", "past_state"),
    outputs=("output", "present_state"),
    body=body,
)
"""Inputs: x float32[batch, rows, channels]; weight float32[channels, 1, kernel];
past_state float32[batch, kernel - 1, channels], the raw rows before x, oldest first.
Outputs: silu of the convolution, like x; present_state, the last kernel - 1 raw rows."""
