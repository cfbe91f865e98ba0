"""DeferredDelta: commit rows of the last call to a gated delta state, then run new rows, of which some may be kept.

It is no form of GatedDelta but an operator of its own: what is kept of a verify is decided by the next call, so the
state that it gives is usually the one before the new rows, not after them. A state so needs one read and one write
for each cycle, and a commit is no call of its own. A prefill, which knows what it keeps, says so at once.
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
        "kept_rows",
    ),
    outputs=("output", "present_state", "next_key", "next_value", "next_decay", "next_beta"),
    body=body,
)
"""Inputs: query, key, value, decay, beta, the new rows, and past_state, as GatedDelta takes them (a kernel also takes
query, key and value in bfloat16 or float16). staged_key float32[batch, staged_rows, num_key_heads * key_dim], of unit
length; staged_value [batch, staged_rows, num_value_heads * value_dim], of value's type; staged_decay and staged_beta
float32[batch, staged_rows, num_value_heads]: the next_* of the last call. staged_rows is a capacity that does not
depend on the number of new rows. accepted_rows int32[batch], 0..staged_rows, how many of the staged rows each sequence
keeps; rows behind them are not read. kept_rows int32[batch], 0..rows, how many of the new rows are made permanent at
once: 0 in a verify, whose rows are decided later; the number of valid rows in a prefill chunk, so that the padding
behind them does not touch the state. Whoever keeps rows at once passes accepted_rows 0 at the next call.

Outputs: output like value, no row of which depends on kept_rows or on rows behind it; present_state like past_state,
after the accepted staged rows and then the kept new ones; next_key, next_value, next_decay, next_beta like the
staged_*: the new rows, keys of unit length, as many as there is room for. Rows of next_* behind the new ones mean
nothing, and new rows behind staged_rows are not stored: they can be kept at once only.

In order, inputs, the integer rows, and outputs are the parameters of the kernel. It may write present_state over
past_state. Each next_* needs a buffer other than the staged_* of the same call: two sets that change places every
cycle."""
