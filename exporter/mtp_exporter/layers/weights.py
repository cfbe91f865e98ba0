"""Weights of a graph by role."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from mtp_plugins.graph import GraphBuilder


class Weights:
    """Looks weights up by role below a prefix and adds them to a graph when first used."""

    def __init__(self, g: GraphBuilder, tensors: Mapping[str, ir.ExternalTensor], prefix: str = "") -> None:
        self._g, self._tensors, self._prefix = g, tensors, prefix

    def __getitem__(self, role: str) -> ir.Value:
        tensor = self._tensors[self._prefix + role]
        return self._g.initializer(tensor.name, tensor)

    def below(self, prefix: str) -> Weights:
        """The weights whose role starts with `prefix`."""
        return Weights(self._g, self._tensors, self._prefix + prefix)
