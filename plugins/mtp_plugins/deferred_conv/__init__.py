"""DeferredConv: commit rows of the last call to a convolution state, then run new rows, of which some may be kept.

The counterpart of DeferredDelta for the convolution before it: both take the same counts of accepted and of kept rows,
so a layer's two states always belong to the same row.
"""

from mtp_plugins.deferred_conv.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="DeferredConv",
    inputs=("x", "weight", "past_state", "staged_x", "accepted_rows", "kept_rows"),
    outputs=("output", "present_state", "next_x"),
    body=body,
)
"""Inputs: x, weight and past_state as CausalConvState takes them (a kernel also takes bfloat16 or float16, each of its
own). staged_x, of x's type, [batch, staged_rows, channels]: next_x of the last call; staged_rows is a capacity that
does not depend on the number of new rows. accepted_rows int32[batch], 0..staged_rows, how many of the staged rows each
sequence keeps; kept_rows int32[batch], 0..rows, how many of the new rows are made permanent at once, as DeferredDelta
takes both. Whoever keeps rows at once passes accepted_rows 0 at the next call.

Outputs: output like x, no row of which depends on kept_rows or on rows behind it; present_state like past_state, the
last kernel - 1 raw rows up to the last kept one; next_x like staged_x: x, as many rows as there is room for. Rows of
next_x behind the new ones mean nothing, and new rows behind staged_rows are not stored.

In order, inputs, the integer rows, and outputs are the parameters of the kernel. It may write present_state over
past_state, but not next_x over staged_x."""
