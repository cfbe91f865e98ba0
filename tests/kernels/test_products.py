"""`PackedProduct` against the matrices that the integers stand for, and rows that do not depend on their number."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph
from mtp_engines.errors import BundleError
from mtp_engines.kernels import library
from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering.own_kernels import KERNELS, merge_products
from mtp_exporter.storing.blocks import four_bits
from mtp_plugins.block_weight.reference import block_weight, integers, turned, turning
from mtp_plugins.graph import GraphBuilder
from mtp_plugins.rotated_weight.reference import rotated_weight, rotation

from .sessions import normal, open_model


@pytest.fixture(autouse=True, params=library.INSTRUCTIONS)
def used(request: pytest.FixtureRequest, own_kernels: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every kind of instructions that this processor has."""
    used: str = request.param
    if library.INSTRUCTIONS.index(used) > library.INSTRUCTIONS.index(library.instructions()):
        pytest.skip(f"this processor has no {used}")
    monkeypatch.setenv(library.CHOICE, "own-avx2" if used == "avx2" else "own")
    assert PackedMatrices().used == used
    return used


SHAPES = [(70, 192), (5, 64), (33, 100), (17, 21), (8, 63), (1, 1), (16, 640), (300, 1088)]
"""Rows and columns, whole groups and blocks and parts of them."""


class Made(NamedTuple):
    """A packed matrix, which lives as long as its memory is held, and what it stands for."""

    memory: PackedMatrices
    address: int
    weight: np.ndarray


Maker = Callable[[int, int], Made]


def blocks(rows: int, columns: int) -> Made:
    """Blocks of 4 bits."""
    memory, (stored, scales) = PackedMatrices(threads=2), four_bits(normal(1, rows, columns))
    return Made(memory, memory.blocks(stored, scales, columns), block_weight(stored, scales, turning(), columns))


def rotated(rows: int, columns: int) -> Made:
    """8 bits, by columns."""
    memory, (values, scales, by) = PackedMatrices(threads=2), _rotated(rows, columns)
    address = memory.rotated(values, scales, len(by), by_rows=False)
    return Made(memory, address, rotated_weight(values, scales, by))


def rotated_by_rows(rows: int, columns: int) -> Made:
    """8 bits, by rows."""
    memory, (values, scales, by) = PackedMatrices(threads=2), _rotated(rows, columns)
    address = memory.rotated(values.T.copy(), scales, len(by), by_rows=True)
    return Made(memory, address, rotated_weight(values, scales, by))


def _rotated(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(2)
    values = generator.integers(1, 256, (columns, rows)).astype(np.uint8)
    return values, generator.uniform(0.01, 0.02, rows).astype(np.float32), rotation(columns)


def whole(rows: int, columns: int) -> Made:
    """Floats."""
    memory, weight = PackedMatrices(threads=2), normal(1, rows, columns)
    return Made(memory, memory.whole(weight), weight)


KINDS: list[tuple[Maker, float]] = [(blocks, 0.012), (rotated, 0.002), (rotated_by_rows, 0.002), (whole, 1e-6)]
"""How to make a matrix, and the mean error of products over their mean size: of 8 and of at least 11 bits of x."""


def open_product(made: Made, threads: int = 1) -> ort.InferenceSession:
    return open_model(product_model(made.address), threads)


def product_model(*addresses: int) -> ir.Model:
    g = GraphBuilder("product")
    x = g.input("x", "float32", ["batch", "rows", "columns"])
    ys = g.op_multi("PackedProduct", x, outputs=["y"] * len(addresses), domain=KERNELS, matrices=list(addresses))
    g.output("y", ys[0], "float32", ["batch", "rows", "out"])
    return g.model(domains=[KERNELS])


def run(session: ort.InferenceSession, x: np.ndarray) -> np.ndarray:
    (found,) = session.run(None, {"x": x[None]})
    return np.asarray(found[0])


@pytest.mark.parametrize(("make", "limit"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_matrix(make: Maker, limit: float, shape: tuple[int, int]) -> None:
    made, x = make(*shape), normal(3, 40, shape[1])
    got = run(open_product(made), x)
    expected = x.astype(np.float64) @ made.weight.astype(np.float64).T
    assert np.abs(got - expected).mean() < limit * np.abs(expected).mean()
    if shape[0] > 1:
        moved = np.abs(np.roll(got, 1, axis=1) - expected).mean()
        assert moved > 0.3 * np.abs(expected).mean(), "control: columns in other places are seen"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1])
def test_products_of_blocks_are_those_of_the_rounded_rows(shape: tuple[int, int]) -> None:
    """Stored integers are 8 too large, which a product takes back; rounding hides it from a comparison with floats."""
    rows, columns = shape
    made, x = blocks(rows, columns), normal(3, 40, columns)
    stored, scales = four_bits(normal(1, rows, columns))
    runs = turned(x.astype(np.float64), turning().astype(np.float64))
    steps = np.abs(runs).max(-1, keepdims=True) / 127
    units = np.rint(runs / steps)
    weights = integers(stored).astype(np.float64)

    def product(zero: int) -> np.ndarray:
        return np.einsum("xbk,rbk,rb,xb->xr", units, weights - zero, scales, steps[..., 0])

    got, size = run(open_product(made), x), np.abs(product(8)).mean()
    assert np.abs(got - product(8)).mean() < 2e-5 * size
    assert np.abs(got - product(7)).mean() > 1e-4 * size, "control: another zero point is seen"


@pytest.mark.parametrize(("make", "limit"), KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_how_many_there_are(make: Maker, limit: float, threads: int) -> None:
    session, x = open_product(make(1100, 320), threads), normal(4, 133, 320)
    together = run(session, x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 64):
        for first in (0, 3, 133 - rows):
            np.testing.assert_array_equal(run(session, x[first : first + rows]), together[first : first + rows])
    (apart,) = session.run(None, {"x": x[:132].reshape(4, 33, 320)})
    np.testing.assert_array_equal(apart.reshape(132, -1), together[:132])
    other = x[:2] * np.float32(1.000001)
    assert (run(session, other) != together[:2]).any(), "control: a millionth is seen"


@pytest.mark.parametrize(("make", "limit"), KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row_and_is_seen_there(make: Maker, limit: float, bad: float) -> None:
    session, x = open_product(make(40, 192)), normal(5, 6, 192)
    clean = run(session, x)
    x[2, 77] = bad
    got = run(session, x)
    assert not np.isfinite(got[2]).any()
    np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(clean, 2, axis=0))


@pytest.mark.parametrize(("make", "limit"), KINDS)
def test_zeros_tiny_and_huge_rows(make: Maker, limit: float) -> None:
    made, x = make(40, 192), normal(6, 1, 192)
    session = open_product(made)
    assert not run(session, np.zeros((3, 192), np.float32)).any()
    for size in (1e-30, 1e-3, 1e20):
        expected = (x.astype(np.float64) * size) @ made.weight.astype(np.float64).T
        got = run(session, x * np.float32(size))
        assert np.abs(got - expected).mean() < 2 * limit * np.abs(expected).mean()
    for size in (1e-36, 1e-44):
        found = run(session, np.full((1, 192), size, np.float32))
        assert np.abs(found).max() < 1e-30, "what is too small for steps is nothing, or itself"


def test_matrices_that_meet_the_same_rows_are_one_node() -> None:
    """What a layer has: large matrices of integers, and small ones of floats."""
    made = [maker(rows, 192) for maker, rows in ((blocks, 1100), (whole, 5), (rotated, 600), (whole, 16), (blocks, 3))]
    g = GraphBuilder("products")
    x = g.input("x", "float32", ["batch", "rows", 192])
    for number, one in enumerate(made):
        y = g.op("PackedProduct", x, domain=KERNELS, matrices=[one.address])
        g.output(f"y{number}", y, "float32", ["batch", "rows", len(one.weight)])
    model = g.model(domains=[KERNELS])
    merge_products(model.graph)
    assert [node.op_type for node in model.graph] == ["PackedProduct"]
    for threads in (1, 2):
        session = open_model(model, threads)
        for rows in (1, 3, 40):
            given = normal(8, 1, rows, 192)
            found = session.run([f"y{number}" for number in range(len(made))], {"x": given})
            for one, got in zip(made, found, strict=True):
                np.testing.assert_array_equal(got[0], run(open_product(one), given[0]))
    other = open_model(product_model(made[0].address))
    assert (run(other, given[0])[:, 5:8] != found[4][0]).any(), "control: another matrix is seen"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m: m.blocks(np.zeros((8, 3, 32), np.uint8), np.zeros((8, 3), np.float32), 192),
        lambda m: m.blocks(np.zeros((8, 4, 32), np.uint8), np.zeros((8, 3), np.float32), 192),
        lambda m: m.blocks(np.zeros((8, 4, 32), np.int8), np.zeros((8, 4), np.float32), 192),
        lambda m: m.blocks(np.zeros((8, 4, 32), np.uint8), np.zeros((8, 4), np.float64), 192),
        lambda m: m.rotated(np.zeros((192, 8), np.uint8), np.zeros(9, np.float32), 64, by_rows=False),
        lambda m: m.rotated(np.zeros((100, 8), np.uint8), np.zeros(8, np.float32), 64, by_rows=False),
        lambda m: m.rotated(np.zeros((96, 8), np.uint8), np.zeros(8, np.float32), 48, by_rows=False),
        lambda m: m.whole(np.zeros((8, 4), np.float16)),
    ],
)
def test_matrices_of_other_sizes_than_they_say_are_not_packed(wrong: Callable[[PackedMatrices], int]) -> None:
    with pytest.raises(BundleError, match="Build the bundle again"):
        wrong(PackedMatrices())


def test_a_bundle_with_addresses_in_its_graph_is_refused(tmp_path: Path) -> None:
    ir.save(product_model(12345), tmp_path / "backbone.onnx")
    with pytest.raises(BundleError, match=r"holds nodes of mtp.kernels"):
        load_graph(tmp_path / "backbone.onnx")


@pytest.mark.parametrize(("make", "limit"), KINDS)
@pytest.mark.parametrize("shape", [*SHAPES, (1100, 320)])
def test_bits_do_not_depend_on_the_instructions(
    make: Maker, limit: float, shape: tuple[int, int], used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(9, 37, shape[1])
    monkeypatch.setenv(library.CHOICE, "own-avx2")
    plain = open_product(make(*shape))
    monkeypatch.setenv(library.CHOICE, "own-avx2" if used == "avx2" else "own")
    other = open_product(make(*shape))
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 37):
        np.testing.assert_array_equal(run(other, x[:rows]), run(plain, x[:rows]))
    assert (run(other, x[:2] * np.float32(1.01)) != run(plain, x[:2])).any(), "control: other rows are seen"


def test_matrices_packed_for_different_instructions_are_no_node(used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = blocks(8, 192)
    monkeypatch.setenv(library.CHOICE, "own-avx2")
    both = product_model(made.address, (other := blocks(8, 192)).address)
    if used == "avx2":
        open_model(both)
        return
    with pytest.raises(Exception, match="packed differently"):
        open_model(both)
    assert other.memory


def test_matrices_of_different_widths_are_no_node() -> None:
    made = [blocks(8, 192), blocks(8, 191)]
    with pytest.raises(Exception, match="different widths"):
        open_model(product_model(*(one.address for one in made)))


def test_no_rows_give_no_rows() -> None:
    assert run(open_product(blocks(40, 192)), np.zeros((0, 192), np.float32)).shape == (0, 40)


def test_a_session_keeps_the_memory_that_it_reads() -> None:
    session, x = open_product(blocks(40, 192)), normal(7, 3, 192)
    gc.collect()
    before = run(session, x)
    others = [rotated(40, 192) for _ in range(20)]
    np.testing.assert_array_equal(run(session, x), before)
    assert others


def test_rows_of_another_width_and_memory_that_is_no_matrix_are_refused() -> None:
    model = product_model((made := blocks(40, 192)).address)
    with pytest.raises(Exception, match="another width than the matrix"):
        run(open_model(model), np.zeros((2, 191), np.float32))
    memory = np.zeros(64, np.uint8)
    for wrong in (0, memory.ctypes.data):
        with pytest.raises(Exception, match="no packed matrix"):
            open_model(product_model(wrong))
    assert made.memory
