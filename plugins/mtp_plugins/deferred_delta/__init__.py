"""DeferredDelta: commit rows of the last call to a gated delta state, then run new rows without keeping them.

It is no form of GatedDelta but an operator of its own: its state is the one before the new rows, not after them,
and what is kept of a call is decided by the next. A state so needs one read and one write for each cycle, and a
commit is no call of its own.
"""

from mtp_plugins.deferred_delta.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="DeferredDelta",
    inputs=(
        "query",
        "key",
        "value",
        "decay",
        "beta",
        "past_state",
        "staged_key",
        "staged_value",
        "staged_decay",
        "staged_beta",
        "accepted_rows",
    ),
    outputs=("output", "present_state", "next_key", "next_value", "next_decay", "next_beta"),
    body=body,
)
"""Inputs: query, key, value, decay, beta, the new rows, and past_state, as GatedDelta takes them (a kernel also takes
query, key and value in bfloat16 or float16). staged_key float32[batch, staged_rows, num_key_heads * key_dim], of unit
length; staged_value [batch, staged_rows, num_value_heads * value_dim], of value's type; staged_decay and staged_beta
float32[batch, staged_rows, num_value_heads]: the next_* of the last call. accepted_rows int32[batch], 0..staged_rows,
how many of them each sequence keeps; 0 for a sequence that has none, whose staged rows then are not read.
Outputs: output like value; present_state like past_state, after the accepted rows and before the new ones; next_key
float32, like key; next_value, next_decay, next_beta, equal to value, decay and beta.

In order, inputs then outputs are the parameters of the kernel. It may write present_state over past_state. Each next_*
needs a buffer other than the staged_* of the same call: two sets that change places every cycle."""
