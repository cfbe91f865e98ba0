"""Weights in blocks of 4 bits: bodies and kernel against the reference, and rows that do not depend on their number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.lowering import blocks as lowering
from mtp_engines.lowering.products import FAST, WIDE, Matrix, Products
from mtp_exporter.storing.blocks import four_bits
from mtp_plugins.block_rows.reference import block_rows
from mtp_plugins.block_weight import BLOCK, USED
from mtp_plugins.block_weight.reference import block_weight, integers, turned, turning
from mtp_plugins.graph import CONTRIB, DOMAIN, GraphBuilder
from mtp_plugins.registry import OPERATORS

ROWS, COLUMNS = 70, 192


def matrix(seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def opened(g: GraphBuilder, *, functions: tuple[str, ...] = (), domains: tuple[str, ...] = ()) -> ort.InferenceSession:
    model = g.model([OPERATORS[name].function() for name in functions], [*domains])
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])


def stored(g: GraphBuilder, blocks: np.ndarray, scales: np.ndarray, name: str = "") -> list[ir.Value]:
    values = []
    for kind, array in (("blocks", blocks), ("scales", scales)):
        name_of = name + kind
        tensor = ir.tensor(array, name=name_of)
        value = ir.Value(name=name_of, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        g.initializers[name_of] = value
        values.append(value)
    return values


def widened(values: np.ndarray) -> np.ndarray:
    """What the blocks of a matrix stand for."""
    return block_weight(*four_bits(values), turning(), values.shape[1])


def test_a_turn_keeps_products_and_sums_to_zero() -> None:
    by = turning()
    assert by.shape == (USED, BLOCK)
    np.testing.assert_allclose(by @ by.T, np.eye(USED), atol=1e-6)
    np.testing.assert_allclose(by.sum(1), 0, atol=1e-6)
    x, weight = matrix(1, 3), matrix(2)
    runs, stored_runs = turned(x, by), turned(weight, by)
    assert runs.shape == (3, -(-COLUMNS // USED), BLOCK)
    np.testing.assert_allclose(runs.sum(-1), 0, atol=1e-4)
    got = runs.reshape(3, -1) @ stored_runs.reshape(ROWS, -1).T
    np.testing.assert_allclose(got, x @ weight.T, atol=1e-3)
    # What a range of integers without a zero point adds to every value is nothing to a turned row.
    moved = runs.reshape(3, -1) @ (stored_runs + 8).reshape(ROWS, -1).T
    np.testing.assert_allclose(moved, got, atol=1e-2)
    plain = x @ (weight + 8).T
    assert np.abs(plain - x @ weight.T).max() > 10, "control: without the turn it is"


def test_bodies_equal_their_references() -> None:
    blocks, scales = four_bits(matrix())
    ids = np.array([[3, 69, 0], [3, 7, 68]])
    g = GraphBuilder("blocks")
    by = turning()
    values = [*stored(g, blocks, scales), g.constant(by, "float32"), g.constant([COLUMNS])]
    given = g.input("ids", "int64", ["batch", "rows"])
    g.output("weight", g.op("BlockWeight", *values, domain=DOMAIN), "float32", [ROWS, COLUMNS])
    rows = g.op("BlockRows", *values, given, domain=DOMAIN)
    g.output("rows", rows, "float32", ["batch", "rows", COLUMNS])
    session = opened(g, functions=("BlockWeight", "BlockRows"), domains=(DOMAIN,))
    weight, taken = session.run(["weight", "rows"], {"ids": ids})
    expected = block_weight(blocks, scales, by, COLUMNS)
    np.testing.assert_allclose(weight, expected, atol=2e-6)
    np.testing.assert_allclose(taken, block_rows(blocks, scales, by, COLUMNS, ids), atol=2e-6)
    np.testing.assert_allclose(taken, expected[ids], atol=2e-6)


def products(accuracy: int, seed: int = 0, columns: int = COLUMNS) -> tuple[ort.InferenceSession, np.ndarray]:
    """A session with two products of the same rows, and the first matrix."""
    g = GraphBuilder("product")
    x = g.input("x", "float32", ["batch", "rows", columns])
    added, made = Products(accuracy), []
    for number in range(2):
        values = matrix(seed + number, columns=columns)
        made.append(widened(values))
        parts = stored(g, *four_bits(values), name=f"{number}.")
        result = added.add(g, x, Matrix(tuple(parts), "blocks", columns), axis=1)
        g.output(f"y{number}", result, "float32", ["batch", "rows", ROWS])
    assert sum(node.op_type == "FusedMatMul" for node in g.nodes) == 1, "a row is turned once for all its matrices"
    return opened(g, domains=(CONTRIB,)), made[0]


def test_the_kernel_takes_the_layout_of_the_blocks() -> None:
    session, weight = products(WIDE)
    x = np.random.default_rng(5).standard_normal((2, 3, COLUMNS)).astype(np.float32)
    (got,) = session.run(["y0"], {"x": x})
    np.testing.assert_allclose(got, x @ weight.T, rtol=0, atol=2e-4)
    (fast,) = products(FAST)[0].run(["y0"], {"x": x})
    # Rows rounded to 8 bits by blocks; a wrong layout is off by as much as the values.
    assert 1e-3 < np.abs(fast - got).max() < 1
    other = products(WIDE, seed=3)[0].run(["y0"], {"x": x})[0]
    assert np.abs(other - got).max() > 5, "control: another matrix is seen"


def differing(session: ort.InferenceSession, columns: int) -> list[int]:
    """Widths whose rows are not those of one call."""
    x = np.random.default_rng(6).standard_normal((1, 17, columns)).astype(np.float32)
    (whole,) = session.run(["y0"], {"x": x})
    found = []
    for width in range(1, 17):
        parts = [session.run(["y0"], {"x": x[:, start : start + width]})[0] for start in range(0, 17, width)]
        if not np.array_equal(np.concatenate(parts, axis=1), whole):
            found.append(width)
    several = session.run(["y0"], {"x": x.reshape(17, 1, columns)})[0]
    return found if np.array_equal(several[:, 0], whole[0]) else [*found, -17]


@pytest.mark.parametrize("columns", [64, 96, 192, 1024, 3584])
@pytest.mark.parametrize("twin", [False, True])
def test_rows_of_a_product_do_not_depend_on_their_number(
    columns: int, twin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if twin:
        # As on a processor whose kernel rounds an odd row otherwise.
        monkeypatch.setattr(lowering, "rows_are_rounded_alike", lambda: False)
    assert differing(products(FAST, columns=columns)[0], columns) == []


def test_control_a_correction_for_a_zero_point_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "rows_are_rounded_alike", lambda: True)
    monkeypatch.setattr(lowering, "ZERO_POINT", 8)
    found = differing(products(FAST)[0], COLUMNS)
    if not found:
        pytest.skip("this processor's kernels for one row and for several add the correction alike")
    monkeypatch.undo()
    monkeypatch.setattr(lowering, "ZERO_POINT", 8)
    lowering.rows_are_rounded_alike.cache_clear()
    assert not lowering.rows_are_rounded_alike(), "the trial at opening sees it"
    lowering.rows_are_rounded_alike.cache_clear()


@pytest.mark.parametrize(("tails", "share"), [(0, 1.03), (4, 0.6)], ids=["normal", "with large values"])
def test_ranges_and_scales_are_fitted(tails: int, share: float) -> None:
    """Against blocks of 32 in order, whose longer side takes the range: half of the error where a few are large."""
    draw = np.random.default_rng(3)
    shape = (64, 1024)
    values = (draw.standard_t(tails, shape) if tails else draw.standard_normal(shape)).astype(np.float32)
    blocks = values.reshape(64, -1, 32)
    place = np.abs(blocks).argmax(-1, keepdims=True)
    least = np.full(blocks.shape[:-1], np.inf)
    for part in (1.0, 0.96, 0.92, 0.88, 0.84):
        step = np.take_along_axis(blocks, place, -1) / -8 * part
        whole = np.clip(np.rint(blocks / step), -8, 7)
        scale = (blocks * whole).sum(-1) / np.square(whole).sum(-1)
        least = np.minimum(least, np.square(blocks - whole * scale[..., None]).sum(-1))
    got = np.square(widened(values) - values).sum()
    assert got <= share * least.sum()
    assert integers(four_bits(values)[0]).max() < 16


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
    got = widened(values)
    assert np.isfinite(got).all()
    size = np.abs(values).max() or np.float32(1)
    assert np.square((got - values) / size).sum() <= 0.01 * np.square(values / size).sum()


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
    wrong, right = (block_weight(*kept, turning(), COLUMNS) for kept in (change(blocks, scales), (blocks, scales)))
    assert np.abs(wrong - right).max() > 0.1, fault
