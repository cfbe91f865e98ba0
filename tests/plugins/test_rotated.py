"""Rotated matrices of 8 bits: bodies and products against the reference, and rows that do not know of each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.lowering import integers
from mtp_engines.lowering.products import FAST, WIDE, Matrix, Products, Storage
from mtp_exporter.storing.rotated import eight_bits
from mtp_plugins.graph import CONTRIB, DOMAIN, GraphBuilder
from mtp_plugins.rotated_rows.reference import rotated_rows
from mtp_plugins.rotated_weight.reference import rotate, rotated_weight, rotation
from tests.plugins.test_blocks import opened, stored

ROWS, COLUMNS = 70, 192


def matrix(seed: int = 0, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def outliers(seed: int, rows: int) -> np.ndarray:
    """Rows as models have them: a few columns are a hundred times the others."""
    x = matrix(seed, rows)
    x[:, [7, 100]] *= 100
    return x


@pytest.mark.parametrize(("columns", "size"), [(64, 64), (1024, 64), (96, 32), (160, 32), (48, 16), (7, 1)])
def test_a_rotation_is_its_own_inverse(columns: int, size: int) -> None:
    by = rotation(columns)
    assert by.shape == (size, size)
    np.testing.assert_array_equal(by, by.T)
    np.testing.assert_allclose(by @ by, np.eye(size), atol=1e-6)
    x = matrix(1, 3, columns)
    np.testing.assert_allclose(rotate(rotate(x, by), by), x, atol=1e-5)


def test_bodies_equal_their_references() -> None:
    values, scales = eight_bits(matrix())
    by, ids = rotation(COLUMNS), np.array([[3, 69, 0], [3, 7, 68]])
    g = GraphBuilder("rotated")
    rows, scale = stored(g, values, scales)
    turned, given = g.constant(by, "float32"), g.input("ids", "int64", ["batch", "rows"])
    transposed = g.op("Transpose", rows, perm=[1, 0])
    weight = g.op("RotatedWeight", transposed, scale, turned, domain=DOMAIN)
    g.output("weight", weight, "float32", [ROWS, COLUMNS])
    taken = g.op("RotatedRows", rows, scale, turned, given, domain=DOMAIN)
    g.output("rows", taken, "float32", ["batch", "rows", COLUMNS])
    session = opened(g, functions=("RotatedWeight", "RotatedRows"), domains=(DOMAIN,))
    got, got_rows = session.run(["weight", "rows"], {"ids": ids})
    expected = rotated_weight(values.T, scales, by)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    np.testing.assert_allclose(got_rows, rotated_rows(values, scales, by, ids), atol=2e-6)
    np.testing.assert_allclose(got_rows, expected[ids], atol=2e-6)
    assert np.abs(rotated_weight(values.T, np.roll(scales, 1), by) - expected).max() > 0.01, "control: other scales"


def products(accuracy: int, storage: Storage, seed: int = 0) -> tuple[ort.InferenceSession, np.ndarray]:
    """A session with two products of the same rows, and the first matrix."""
    g = GraphBuilder("product")
    x = g.input("x", "float32", ["batch", "rows", COLUMNS])
    added = Products(accuracy)
    made = []
    for number in range(2):
        values, scales = eight_bits(matrix(seed + number))
        made.append(rotated_weight(values.T, scales, rotation(COLUMNS)))
        parts = stored_as(g, f"{number}", values if storage == "rotated rows" else values.T, scales)
        g.output(f"y{number}", added.add(g, x, Matrix(parts, storage), axis=1), "float32", ["batch", "rows", ROWS])
    rounded = [node for node in g.nodes if node.op_type in ("QuantizeLinear", "Round")]
    assert len(rounded) == (1 if accuracy == FAST else 3), "a row is rounded once for all its matrices"
    return opened(g, domains=(CONTRIB,)), made[0]


def stored_as(g: GraphBuilder, name: str, values: np.ndarray, scales: np.ndarray) -> tuple[ir.Value, ...]:
    found = []
    for kind, array in (("values", values), ("scales", scales)):
        tensor = ir.tensor(np.ascontiguousarray(array), name=f"{name}.{kind}")
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        g.initializers[str(tensor.name)] = value
        found.append(value)
    return tuple(found)


@pytest.mark.parametrize("storage", ["rotated rows", "rotated columns"])
def test_products_equal_those_of_the_matrix(storage: Storage) -> None:
    session, weight = products(WIDE, storage)
    x = outliers(5, 6).reshape(2, 3, COLUMNS)
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    (got,) = session.run(["y0"], {"x": x})
    scale = np.abs(expected).max()
    assert np.abs(got - expected).max() < 2e-6 * scale
    (fast,) = products(FAST, storage)[0].run(["y0"], {"x": x})
    # Rows rounded to 8 bits; without the rotation two great columns would leave the others four bits.
    assert 2e-4 * scale < np.abs(fast - expected).max() < 0.02 * scale
    other = products(WIDE, storage, seed=3)[0].run(["y0"], {"x": x})[0]
    assert np.abs(other - got).max() > 0.2 * scale, "control: another matrix is seen"


def test_control_without_the_rotation_great_columns_cost_the_others_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = outliers(5, 6).reshape(2, 3, COLUMNS)

    def error() -> float:
        session, weight = products(FAST, "rotated columns")
        expected = x.astype(np.float64) @ weight.T.astype(np.float64)
        (got,) = session.run(["y0"], {"x": x})
        return float(np.sqrt(np.square(got - expected).mean()))

    turned = error()
    whole = np.eye(1, dtype=np.float32)
    for place in ("mtp_exporter.storing.rotated.rotation", f"{__name__}.rotation"):
        monkeypatch.setattr(place, lambda columns: whole)
    monkeypatch.setattr(integers, "rotation", lambda columns: whole)
    assert error() > 2 * turned


@pytest.mark.parametrize("accuracy", [FAST, WIDE])
def test_rows_of_a_product_do_not_depend_on_their_number(accuracy: int) -> None:
    session, _ = products(accuracy, "rotated columns")
    x = outliers(6, 17)[None]
    (whole,) = session.run(["y0"], {"x": x})
    for width in (1, 2, 3, 5, 16):
        parts = [session.run(["y0"], {"x": x[:, start : start + width]})[0] for start in range(0, 17, width)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole, err_msg=f"{width} rows")
    if accuracy == FAST:
        changed = x.copy()
        changed[0, 3, 0] += 1
        (got,) = session.run(["y0"], {"x": changed})
        assert [int(row) for row in np.flatnonzero((got != whole).any((0, 2)))] == [3], "control: one row is another"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_comes_out_so_in_its_row_alone(bad: float) -> None:
    session, _ = products(FAST, "rotated columns")
    x = matrix(7, 3)[None].copy()
    x[0, 1, 5] = bad
    (got,) = session.run(["y0"], {"x": x})
    assert np.isfinite(got[0, [0, 2]]).all()
    assert not np.isfinite(got[0, 1]).any()


@pytest.mark.parametrize(
    "values",
    [np.zeros((2, 64), np.float32), np.full((2, 64), 3.0, np.float32), np.full((2, 64), 1e-30, np.float32)],
    ids=["zeros", "equal", "tiny"],
)
def test_rows_of_every_kind_come_back(values: np.ndarray) -> None:
    integers_, scales = eight_bits(values)
    got = rotated_weight(integers_.T, scales, rotation(64))
    np.testing.assert_allclose(got, values, rtol=1e-5, atol=1e-35)


def test_no_value_is_further_off_than_half_a_step() -> None:
    values = matrix(3)
    integers_, scales = eight_bits(values)
    turned = rotate(values, rotation(COLUMNS))
    assert (np.abs((integers_ - np.float32(128)) * scales[:, None] - turned) <= scales[:, None] * 0.501).all()
    assert integers_.min() >= 1


@pytest.mark.parametrize(
    ("fault", "change"),
    [
        ("another middle", lambda values, scales: (values ^ 0x80, scales)),
        ("scales of the next row", lambda values, scales: (values, np.roll(scales, 1))),
        ("columns one off", lambda values, scales: (np.roll(values, 1, axis=1), scales)),
    ],
)
def test_control_a_wrong_layout_is_noticed(
    fault: str, change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
) -> None:
    values, scales = eight_bits(matrix())
    by = rotation(COLUMNS)
    wrong, scales_wrong = change(values, scales)
    assert np.abs(rotated_weight(wrong.T, scales_wrong, by) - rotated_weight(values.T, scales, by)).max() > 0.01, fault
