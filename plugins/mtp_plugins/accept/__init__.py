"""Accept: the longest prefix of a draft that the target chose itself, and its next token.

It has no part in a canonical graph. It lets a device decide how many rows DeferredDelta and DeferredConv commit, so
that a cycle need not wait for the host.
"""

from mtp_plugins.accept.body import body
from mtp_plugins.operator import Operator

OPERATOR = Operator(
    name="Accept",
    inputs=("draft", "chosen"),
    outputs=("accepted", "accepted_rows", "emitted", "next_token"),
    body=body,
)
"""Inputs: draft int64[batch, draft_tokens], which may be empty; chosen int64[batch, draft_tokens + 1], the target's
choice after each row of the verify.
Outputs: accepted int32[batch], 0..draft_tokens; accepted_rows int32[batch] = accepted + 1, the rows that the target
keeps (the pending token's and the accepted ones') and the number of emitted tokens; emitted int64[batch,
draft_tokens + 1], zeros behind the emitted ones; next_token int64[batch], the bonus token, the last emitted one.

In order, inputs, the integer draft_tokens, and outputs are the parameters of the kernel."""
