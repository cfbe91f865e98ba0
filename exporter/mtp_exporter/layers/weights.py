"""Weights of a graph by role."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from mtp_exporter.weights import Blocks, Stored
from mtp_plugins.graph import DOMAIN, GraphBuilder


class Weights:
    """Looks weights up by role below a prefix and adds them to a graph when first used."""

    def __init__(self, g: GraphBuilder, tensors: Mapping[str, Stored], prefix: str = "") -> None:
        self._g, self._tensors, self._prefix = g, tensors, prefix

    def __getitem__(self, role: str) -> ir.Value:
        stored = self._tensors[self._prefix + role]
        if not isinstance(stored, Blocks):
            return self._g.initializer(stored.name, stored)
        return self._g.op("BlockWeight", *self._parts(stored), domain=DOMAIN, bits=stored.bits)

    def rows(self, role: str, ids: ir.Value) -> ir.Value:
        """float32[..., columns], the rows of a matrix at int64[...] ids."""
        stored = self._tensors[self._prefix + role]
        if not isinstance(stored, Blocks):
            return self._g.op("Gather", self[role], ids, axis=0)
        return self._g.op("BlockRows", *self._parts(stored), ids, domain=DOMAIN, bits=stored.bits)

    def _parts(self, stored: Blocks) -> tuple[ir.Value, ir.Value]:
        blocks, scales = stored.blocks, stored.scales
        return self._g.initializer(blocks.name, blocks), self._g.initializer(scales.name, scales)

    def below(self, prefix: str) -> Weights:
        """The weights whose role starts with `prefix`."""
        return Weights(self._g, self._tensors, self._prefix + prefix)
