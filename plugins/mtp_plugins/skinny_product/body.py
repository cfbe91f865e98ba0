"""SkinnyProduct as standard operators: MatMul in float32."""

from __future__ import annotations

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


def body(g: GraphBuilder, inputs: list[ir.Value]) -> list[ir.Value]:
    """See `OPERATOR` for shapes."""
    x, weight = (g.op("Cast", value, to=int(ir.DataType.FLOAT)) for value in inputs)
    product = g.op("MatMul", x, g.op("Transpose", weight, perm=[1, 0]))
    output = g.op("Cast", product)
    node = output.producer()
    assert node is not None
    node.attributes.add(ir.RefAttr("to", "to", ir.AttributeType.INT))
    return [output]
