"""DeferredConv: commit rows of the last call to a convolution state, then run new rows without keeping them.

The counterpart of DeferredDelta for the convolution before it: both take one count of accepted rows, so a layer's
two states always belong to the same row.
"""

from mtp_plugins.deferred_conv.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="DeferredConv",
    inputs=("x", "weight", "past_state", "staged_x", "accepted_rows"),
    outputs=("output", "present_state", "next_x"),
    body=body,
)
"""Inputs: x, weight and past_state as CausalConvState takes them (a kernel also takes bfloat16 or float16, each of its
own). staged_x, of x's type, [batch, staged_rows, channels]: next_x of the last call. accepted_rows int32[batch],
0..staged_rows, how many of them each sequence keeps.
Outputs: output like x; present_state like past_state, the last kernel - 1 raw rows after the accepted ones and before
the new ones; next_x, equal to x.

In order, inputs then outputs are the parameters of the kernel. It may write present_state over past_state, but not
next_x over staged_x."""
