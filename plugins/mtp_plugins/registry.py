"""All custom operators by name; a new one is a folder and a line here."""

from __future__ import annotations

from mtp_plugins import (
    accept,
    block_rows,
    block_weight,
    cached_attention,
    causal_conv_state,
    deferred_conv,
    deferred_delta,
    delta_gate,
    gated_delta,
    latent_attention,
    paged_attention,
    paged_kv_append,
    rotated_rows,
    rotated_weight,
    routed_experts,
    skinny_product,
)
from mtp_plugins.operator import Operator

OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        accept.OPERATOR,
        block_rows.OPERATOR,
        block_weight.OPERATOR,
        cached_attention.OPERATOR,
        causal_conv_state.OPERATOR,
        deferred_conv.OPERATOR,
        deferred_delta.OPERATOR,
        delta_gate.OPERATOR,
        gated_delta.OPERATOR,
        latent_attention.OPERATOR,
        paged_attention.OPERATOR,
        paged_kv_append.OPERATOR,
        rotated_rows.OPERATOR,
        rotated_weight.OPERATOR,
        routed_experts.OPERATOR,
        skinny_product.OPERATOR,
    )
}
