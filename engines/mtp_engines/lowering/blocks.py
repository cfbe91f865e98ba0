"""Products of rows with a matrix of 4-bit blocks, whose rows do not depend on how many there are."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from mtp_engines.lowering.rows import with_twin
from mtp_plugins.block_weight import BLOCK, USED
from mtp_plugins.block_weight.reference import turning
from mtp_plugins.graph import CONTRIB, GraphBuilder

ZERO_POINT = 0
"""Of all blocks. With another one the kernel that takes one row adds a correction at another place than the kernel for
several does, and rounds otherwise."""
_FATAL_ONLY = 4


class BlockProducts:
    """Adds products to one graph; a row that several matrices multiply is turned once."""

    def __init__(self, accuracy: int) -> None:
        """`accuracy`: a level of MatMulNBits."""
        self._accuracy = accuracy
        self._turning: ir.Value | None = None
        self._turned: dict[ir.Value, ir.Value] = {}

    def add(
        self,
        g: GraphBuilder,
        x: ir.Value,
        blocks: ir.Value,
        scales: ir.Value,
        shape: tuple[int, int],
        *,
        axis: int,
    ) -> ir.Value:
        """x @ weight^T for the operands of `BlockWeight`.

        Args:
            g: builds nodes that come after those of earlier calls.
            x: float32[..., rows, columns], with its rows along `axis`.
            shape: rows and columns of the matrix.
        """
        count, columns = shape
        rows = None if rows_are_rounded_alike() else g.op("Shape", x, start=axis, end=axis + 1)
        if x not in self._turned:
            wide = x if rows is None else with_twin(g, x, rows, _even(g, rows), axis=axis)
            self._turned[x] = self._turn(g, wide, columns, axis)
        product = matrix_product(g, self._turned[x], blocks, scales, (count, columns), self._accuracy)
        return product if rows is None else g.op("Slice", product, g.constant([0]), rows, g.constant([axis]))

    def _turn(self, g: GraphBuilder, x: ir.Value, columns: int, axis: int) -> ir.Value:
        if self._turning is None:
            self._turning = g.constant(turning(), "float32")
        missing, keep = -columns % USED, [0] * (axis + 1)
        padded = g.op("Pad", x, g.constant([0, missing]), None, g.constant([axis + 1])) if missing else x
        runs = g.op("Reshape", padded, g.constant([*keep, _blocks(columns), USED]))
        turned = g.op("FusedMatMul", runs, self._turning, domain=CONTRIB)
        return g.op("Reshape", turned, g.constant([*keep, _blocks(columns) * BLOCK]))


def matrix_product(
    g: GraphBuilder, turned: ir.Value, blocks: ir.Value, scales: ir.Value, shape: tuple[int, int], accuracy: int
) -> ir.Value:
    """Turned rows, float32[..., 64 * count], times the integers of a matrix of this shape."""
    rows, columns = shape
    zeros = np.full((rows, -(-_blocks(columns) // 2)), ZERO_POINT * 17, np.uint8)
    return g.op(
        "MatMulNBits",
        turned,
        blocks,
        scales,
        g.constant(zeros, "uint8"),
        domain=CONTRIB,
        K=_blocks(columns) * BLOCK,
        N=rows,
        bits=4,
        block_size=BLOCK,
        accuracy_level=accuracy,
    )


def _even(g: GraphBuilder, rows: ir.Value) -> ir.Value:
    return g.op("Mul", g.op("Div", g.op("Add", rows, g.constant([1])), g.constant([2])), g.constant([2]))


def _blocks(columns: int) -> int:
    return -(-columns // USED)


@cache
def rows_are_rounded_alike() -> bool:
    """Whether this processor's kernel gives a row the same bits among any others; tried once on a small product.

    Where it does not, an odd number of rows gets one more: kernels take rows in pairs and what is left in another way
    (seen with AVX-512 and VNNI). A build tests the same at its own sizes.
    """
    generator = np.random.default_rng(0)
    count, rows = 5, 39
    g = GraphBuilder("trial")
    x = g.input("x", "float32", ["rows", count * BLOCK])
    blocks = g.constant(generator.integers(0, 256, (rows, count, BLOCK // 2)), "uint8")
    scales = g.constant(generator.uniform(0.01, 0.02, (rows, count)), "float32")
    product = matrix_product(g, x, blocks, scales, (rows, count * USED), 4)
    g.output("y", product, "float32", ["rows", rows])
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, _FATAL_ONLY
    payload = ir.to_proto(g.model(domains=[CONTRIB])).SerializeToString()
    session = ort.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    given = generator.standard_normal((8, count * BLOCK), np.float32)
    (together,) = session.run(None, {"x": given})
    parts = [(first, first + rows) for rows in range(1, len(given)) for first in range(len(given) - rows + 1)]
    return all((session.run(None, {"x": given[a:b]})[0] == together[a:b]).all() for a, b in parts)
