"""Weights in blocks of 4 bits: bodies and kernel against the reference, and rows that do not depend on their number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.lowering.products import FAST, WIDE, Matrix, Products
from mtp_exporter.storing.blocks import four_bits
from mtp_plugins.block_rows.reference import block_rows
from mtp_plugins.block_weight.reference import block_weight, integers
from mtp_plugins.graph import CONTRIB, DOMAIN, GraphBuilder
from mtp_plugins.registry import OPERATORS

ROWS, COLUMNS = 70, 96


def matrix(seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def opened(g: GraphBuilder, *, functions: tuple[str, ...] = (), domains: tuple[str, ...] = ()) -> ort.InferenceSession:
    model = g.model([OPERATORS[name].function() for name in functions], [*domains])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def stored(g: GraphBuilder, blocks: np.ndarray, scales: np.ndarray) -> list[ir.Value]:
    values = []
    for name, array in (("blocks", blocks), ("scales", scales)):
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        g.initializers[name] = value
        values.append(value)
    return values


def test_bodies_equal_their_references() -> None:
    blocks, scales = four_bits(matrix())
    ids = np.array([[3, 69, 0], [3, 7, 68]])
    g = GraphBuilder("blocks")
    values = stored(g, blocks, scales)
    given = g.input("ids", "int64", ["batch", "rows"])
    g.output("weight", g.op("BlockWeight", *values, domain=DOMAIN), "float32", [ROWS, COLUMNS])
    rows = g.op("BlockRows", *values, given, domain=DOMAIN)
    g.output("rows", rows, "float32", ["batch", "rows", COLUMNS])
    session = opened(g, functions=("BlockWeight", "BlockRows"), domains=(DOMAIN,))
    weight, taken = session.run(["weight", "rows"], {"ids": ids})
    np.testing.assert_array_equal(weight, block_weight(blocks, scales))
    np.testing.assert_array_equal(taken, block_rows(blocks, scales, ids))
    np.testing.assert_array_equal(taken, weight[ids])


def products(accuracy: int, seed: int = 0) -> tuple[ort.InferenceSession, np.ndarray]:
    blocks, scales = four_bits(matrix(seed))
    g = GraphBuilder("product")
    x = g.input("x", "float32", ["batch", "rows", COLUMNS])
    result = Products(accuracy).add(g, x, Matrix(tuple(stored(g, blocks, scales)), "blocks"), axis=1)
    g.output("y", result, "float32", ["batch", "rows", ROWS])
    return opened(g, domains=(CONTRIB,)), block_weight(blocks, scales)


def test_the_kernel_takes_the_layout_of_the_blocks() -> None:
    session, weight = products(WIDE)
    x = np.random.default_rng(5).standard_normal((2, 3, COLUMNS)).astype(np.float32)
    (got,) = session.run(None, {"x": x})
    np.testing.assert_allclose(got, x @ weight.T, rtol=0, atol=3e-5)
    (fast,) = products(FAST)[0].run(None, {"x": x})
    # Rows rounded to 8 bits by blocks; a wrong layout is off by as much as the values.
    assert 1e-4 < np.abs(fast - got).max() < 0.5
    other = products(WIDE, seed=1)[0].run(None, {"x": x})[0]
    assert np.abs(other - got).max() > 5, "control: another matrix is seen"


def test_rows_of_a_product_do_not_depend_on_their_number() -> None:
    session, _ = products(FAST)
    x = np.random.default_rng(6).standard_normal((1, 17, COLUMNS)).astype(np.float32)
    (whole,) = session.run(None, {"x": x})
    for width in (1, 2, 3, 5, 16):
        parts = [session.run(None, {"x": x[:, start : start + width]})[0] for start in range(0, 17, width)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole, err_msg=f"{width} rows")


def test_scales_are_fitted() -> None:
    values = matrix(3)
    blocks, scales = four_bits(values)
    error = np.abs(block_weight(blocks, scales) - values).reshape(ROWS, -1, 32)
    assert integers(blocks).max() < 16
    # The ends of the range may be cut off, for less error in all.
    squares = np.square(error).mean()
    plain = np.abs(values.reshape(ROWS, -1, 32)).max(-1, keepdims=True) / 7
    nearest = np.clip(np.rint(values.reshape(ROWS, -1, 32) / plain), -8, 7) * plain
    assert squares <= np.square(nearest - values.reshape(ROWS, -1, 32)).mean() * 0.9


@pytest.mark.parametrize(
    "values",
    [
        np.zeros((2, 64), np.float32),
        np.full((2, 64), 3.0, np.float32),
        np.full((2, 64), -3.0, np.float32),
        np.tile(np.float32([1e-38, -1e-38]), (2, 32)),
        np.where(np.arange(64) == 5, np.float32(1e30), np.float32(0))[None].repeat(2, 0),
    ],
    ids=["zeros", "equal", "equal, negative", "tiny", "one great value"],
)
def test_blocks_of_every_kind_come_back(values: np.ndarray) -> None:
    got = block_weight(*four_bits(values))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got, values, rtol=1e-5, atol=2e-38)


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("nibbles swapped", lambda blocks, scales: (blocks >> 4 | blocks << 4, scales)),
        ("scales of the next block", lambda blocks, scales: (blocks, np.roll(scales, 1, axis=1))),
        ("another middle", lambda blocks, scales: (blocks ^ 0x88, scales)),
    ],
)
def test_control_a_wrong_layout_is_noticed(
    fault: str, change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> None:
    blocks, scales = four_bits(matrix())
    wrong = block_weight(*change(blocks, scales))
    assert np.abs(wrong - block_weight(blocks, scales)).max() > 0.1, fault
