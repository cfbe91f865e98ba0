"""LatentAttention as standard operators: CachedAttention with one cache that is key and value."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.cached_attention.body import attend
from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes; the number of heads is read from the widths of query and past."""
    query, rows, past, past_length = inputs
    present = g.op("TensorScatter", past, g.op("Unsqueeze", rows, g.constant([1])), past_length, axis=2)
    return [attend(g, query, present, present, past, past_length), present]
