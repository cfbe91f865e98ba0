"""Weights of a graph by role."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from mtp_exporter.storing.weights import Blocks, Rotated, Stored
from mtp_plugins.block_weight.reference import turning
from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.rotated_weight.reference import rotation


class Weights:
    """Looks weights up by role below a prefix and adds them to a graph when first used."""

    def __init__(self, g: GraphBuilder, tensors: Mapping[str, Stored], prefix: str = "") -> None:
        self._g, self._tensors, self._prefix = g, tensors, prefix

    def __getitem__(self, role: str) -> ir.Value:
        stored = self._tensors[self._prefix + role]
        if isinstance(stored, Blocks):
            return self._g.op("BlockWeight", *self._blocks(stored), domain=DOMAIN)
        if isinstance(stored, Rotated):
            values, *others = self._rotated(stored)
            if stored.by_rows:
                values = self._g.op("Transpose", values, perm=[1, 0])
            return self._g.op("RotatedWeight", values, *others, domain=DOMAIN)
        return self._g.initializer(stored.name, stored)

    def rows(self, role: str, ids: ir.Value) -> ir.Value:
        """float32[..., columns], the rows of a matrix at int64[...] ids."""
        stored = self._tensors[self._prefix + role]
        if isinstance(stored, Blocks):
            return self._g.op("BlockRows", *self._blocks(stored), ids, domain=DOMAIN)
        if isinstance(stored, Rotated):
            assert stored.by_rows, f"{role} is stored by columns, but its rows are read"
            return self._g.op("RotatedRows", *self._rotated(stored), ids, domain=DOMAIN)
        return self._g.op("Gather", self[role], ids, axis=0)

    def _blocks(self, stored: Blocks) -> list[ir.Value]:
        by, columns = self._g.constant(turning(), "float32"), self._g.constant([stored.columns])
        return [*self._parts(stored.blocks, stored.scales), by, columns]

    def _rotated(self, stored: Rotated) -> list[ir.Value]:
        by = self._g.constant(rotation(stored.columns), "float32")
        return [*self._parts(stored.values, stored.scales), by]

    def _parts(self, *tensors: ir.ExternalTensor) -> list[ir.Value]:
        return [self._g.initializer(tensor.name, tensor) for tensor in tensors]

    def below(self, prefix: str) -> Weights:
        """The weights whose role starts with `prefix`."""
        return Weights(self._g, self._tensors, self._prefix + prefix)
