"""RotatedRows as standard operators: the integers are gathered, then made floats."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder
from mtp_plugins.rotated_weight.body import rotated


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    values, scales, rotation, ids = inputs
    return [rotated(g, g.op("Gather", values, ids, axis=0), g.op("Gather", scales, ids, axis=0), rotation)]
