"""What one custom operator declares about itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from mtp_plugins.graph import DOMAIN, OPSET, GraphBuilder


@dataclass(frozen=True)
class Operator:
    """Signature of a custom operator in the domain `mtp`.

    `body` adds standard operators for the inputs, in order, and returns the outputs. It reads every
    size from the shapes of its inputs, so that one body serves every layer of a model.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: Callable[[GraphBuilder, list[ir.Value]], list[ir.Value]]
    attributes: tuple[str, ...] = ()

    def function(self) -> ir.Function:
        """The operator as an ONNX function, which any backend without a kernel can run."""
        builder = GraphBuilder(self.name)
        inputs = [ir.Value(name=name) for name in self.inputs]
        builder.inputs = inputs
        results = self.body(builder, inputs)
        for name, value in zip(self.outputs, results, strict=True):
            final = builder.op("Identity", value)
            final.name = name
            builder.outputs.append(final)
        attributes = [ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in self.attributes]
        return ir.Function(DOMAIN, self.name, graph=builder.graph({"": OPSET}), attributes=attributes)
