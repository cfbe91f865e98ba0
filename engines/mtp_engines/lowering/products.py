"""Products with stored matrices on a CPU: one constant weight that a kernel packs once."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from mtp_engines.lowering.rows import with_twin
from mtp_plugins.block_weight import BLOCK
from mtp_plugins.graph import CONTRIB, DOMAIN, GraphBuilder

FAST, WIDE = 4, 0
"""Accuracy levels of MatMulNBits: rows are rounded to 8 bits by blocks of 32, or stay float32."""
_LEAST_ROWS = 2


@dataclass(frozen=True)
class Matrix:
    """A matrix [out, in] as a graph stores it: whole, or in blocks with scales.

    Attributes:
        tensors: the initializers, one or two.
        bits: of a value in a block; None for a whole matrix.
    """

    tensors: tuple[ir.Value, ...]
    bits: int | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        shape = self.tensors[-1].shape
        assert shape is not None
        rows, columns = (int(str(size)) for size in shape)
        return rows, columns if self.bits is None else columns * BLOCK


def matrix_of(node: ir.Node) -> Matrix | None:
    """The stored matrix whose transpose a MatMul multiplies with; None if it is something else."""
    transposed = node.inputs[1]
    producer = transposed.producer() if transposed is not None else None
    if producer is None or producer.op_type != "Transpose":
        return None
    weight = producer.inputs[0]
    assert weight is not None
    source = weight.producer()
    if source is not None and source.domain == DOMAIN and source.op_type == "BlockWeight":
        blocks, scales = source.inputs
        assert blocks is not None and scales is not None
        return Matrix((blocks, scales), source.attributes["bits"].as_int())
    two = weight.is_initializer() and weight.shape is not None and len(weight.shape) == 2
    return Matrix((weight,), None) if two else None


def product(g: GraphBuilder, x: ir.Value | None, matrix: Matrix, axis: int, accuracy: int = FAST) -> ir.Value:
    """x @ matrix^T.

    Args:
        x: float32, with its rows along `axis`.
        accuracy: `FAST` or `WIDE`, for blocks.
    """
    if matrix.bits is None:
        return g.op("FusedMatMul", x, *matrix.tensors, domain=CONTRIB, transB=1)
    if matrix.bits == 8:
        return _blocks(g, x, matrix, accuracy)
    # With 4 bits one row takes another kernel and rounds differently; two or more agree to the last bit.
    rows = g.op("Shape", x, start=axis, end=axis + 1)
    wide = with_twin(g, x, rows, g.op("Max", rows, g.constant([_LEAST_ROWS])), axis=axis)
    return g.op("Slice", _blocks(g, wide, matrix, accuracy), g.constant([0]), rows, g.constant([axis]))


def _blocks(g: GraphBuilder, x: ir.Value | None, matrix: Matrix, accuracy: int) -> ir.Value:
    assert matrix.bits is not None
    rows, columns = matrix.shape
    return g.op(
        "MatMulNBits",
        x,
        *matrix.tensors,
        domain=CONTRIB,
        K=columns,
        N=rows,
        bits=matrix.bits,
        block_size=BLOCK,
        accuracy_level=accuracy,
    )
