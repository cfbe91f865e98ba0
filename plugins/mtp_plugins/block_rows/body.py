"""BlockRows as standard operators: the blocks are gathered, then made floats."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.block_weight.body import dequantise
from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    blocks, scales, turn, columns, ids = inputs
    taken = (g.op("Gather", blocks, ids, axis=0), g.op("Gather", scales, ids, axis=0))
    return [dequantise(g, *taken, turn, columns)]
