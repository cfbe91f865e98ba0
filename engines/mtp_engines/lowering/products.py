"""Products with stored matrices on a CPU: one constant weight that a kernel packs once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering.blocks import BlockProducts
from mtp_engines.lowering.integers import IntegerProducts
from mtp_engines.lowering.own_kernels import ROWS, packed_product
from mtp_plugins.graph import CONTRIB, DOMAIN, GraphBuilder

FAST, WIDE = 4, 0
"""Accuracy levels of MatMulNBits: rows are rounded to 8 bits by blocks, or stay float32. Products of rotated
matrices know the same two: rows rounded to 8 bits, or taken apart so that nothing is lost."""

SMALL_ROWS = 64
"""Of float32, matrices of so many rows at most are packed: they meet the same rows as large ones of integers do."""

Storage = Literal["whole", "blocks", "rotated columns", "rotated rows"]


@dataclass(frozen=True)
class Matrix:
    """A matrix [out, in] as a graph stores it.

    Attributes:
        tensors: the initializers, one or two.
        storage: float32, `BlockWeight`'s blocks, or `RotatedWeight`'s integers: the columns of [out, in] in order, or,
            for a matrix that is gathered from too, its rows.
        block_columns: columns of a matrix in blocks, which the last block may exceed.
    """

    tensors: tuple[ir.Value, ...]
    storage: Storage = "whole"
    block_columns: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        sizes = [[int(str(size)) for size in value.shape or ()] for value in self.tensors]
        if self.storage == "blocks":
            return sizes[0][0], self.block_columns
        first, second = sizes[0]
        return (second, first) if self.storage == "rotated columns" else (first, second)

    def with_tensors(self, tensors: Sequence[ir.Value]) -> Matrix:
        """The same matrix, or some of its rows, by other initializers."""
        return replace(self, tensors=tuple(tensors))


def matrix_of(node: ir.Node) -> Matrix | None:
    """The stored matrix whose transpose a MatMul multiplies with; None if it is something else."""
    transposed = node.inputs[1]
    producer = transposed.producer() if transposed is not None else None
    if producer is None or producer.op_type != "Transpose":
        return None
    weight = producer.inputs[0]
    assert weight is not None
    source = weight.producer()
    if source is not None and source.domain == DOMAIN:
        first, scales = source.inputs[:2]
        assert first is not None and scales is not None
        if source.op_type == "BlockWeight":
            return Matrix((first, scales), "blocks", block_columns(source))
        if source.op_type == "RotatedWeight":
            turned = first.producer()
            if turned is None:
                return Matrix((first, scales), "rotated columns")
            values = turned.inputs[0]
            assert values is not None
            return Matrix((values, scales), "rotated rows")
    two = weight.is_initializer() and weight.shape is not None and len(weight.shape) == 2
    return Matrix((weight,)) if two else None


def block_columns(node: ir.Node) -> int:
    """Columns of the matrix that a `BlockWeight` or `BlockRows` reads."""
    columns = node.inputs[3]
    known = ir.convenience.get_const_tensor(columns) if columns is not None else None
    assert known is not None
    return int(known.numpy()[0])


class Products:
    """Adds the products of one graph."""

    def __init__(self, accuracy: int = FAST, packed: PackedMatrices | None = None) -> None:
        """Args:
        accuracy: `FAST` or `WIDE`, for matrices of integers.
        packed: where the kernels of this project find matrices of integers; None has ONNX Runtime multiply them.
        """
        self._packed = packed if accuracy == FAST else None
        self._blocks = BlockProducts(accuracy)
        self._integers = IntegerProducts(exact=accuracy == WIDE)

    def packs(self, matrix: Matrix) -> bool:
        """Whether a product reads the matrix packed, and no initializer of the graph."""
        if matrix.storage == "whole":
            return self._packed is not None and matrix.shape[0] <= SMALL_ROWS
        return self._packed is not None

    def add(self, g: GraphBuilder, x: ir.Value, matrix: Matrix, axis: int) -> ir.Value:
        """x @ matrix^T.

        Args:
            g: builds nodes that come after those of earlier calls.
            x: float32, with its rows along `axis` and its columns along the next one, the last.
        """
        if self._packed is not None and self.packs(matrix):
            return packed_product(g, x, matrix, self._packed, [*ROWS][1 - axis :])
        if matrix.storage == "whole":
            return g.op("FusedMatMul", x, *matrix.tensors, domain=CONTRIB, transB=1)
        values, scales = matrix.tensors
        if matrix.storage == "blocks":
            return self._blocks.add(g, x, values, scales, matrix.shape, axis=axis)
        if matrix.storage == "rotated rows":
            # Folded when the session is opened.
            values = g.op("Transpose", values, perm=[1, 0])
        return self._integers.add(g, x, values, scales, matrix.shape[1], axis=axis)
