"""SkinnyProduct's body, and its kernel, interpreted, against the reference, and the bits of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.skinny_product import OPERATOR
from mtp_plugins.skinny_product.launch import BLOCK_BYTES, ROW_BLOCK, launch
from mtp_plugins.skinny_product.reference import skinny_product
from tests.plugins.paged import TYPES
from tests.plugins.workers import Arrays, Change, Worker, run_kernel

# Inputs are exact in their type, so all types differ by sums in float32 alone, below 1e-6 of the largest value;
# the faults here move it by 0.1 and more.
TOLERANCE = 2e-6
FAULT = 1e-2


def feeds(batch: int, rows: int, width_in: int, width_out: int, dtype: str = "float32") -> Arrays:
    """Random inputs."""
    draw = np.random.default_rng(rows).standard_normal
    x = {"x": draw((batch, rows, width_in)), "weight": draw((width_out, width_in))}
    return {name: value.astype(TYPES[dtype]) for name, value in x.items()}


Product = Callable[..., np.ndarray]


def run(
    worker: Worker,
    x: Arrays,
    *,
    output: str = "float32",
    in_block: int | None = None,
    change: Change | None = None,
    product: Product | None = None,
) -> np.ndarray:
    """Output of the kernel; one more sequence than there is must stay as it was.

    product: how the interpreter multiplies two tiles; None as it does.
    """
    batch, rows, width_in = x["x"].shape
    width_out, item_bytes = len(x["weight"]), x["x"].dtype.itemsize
    sizes = launch(batch=batch, rows=rows, width_in=width_in, width_out=width_out, item_bytes=item_bytes, widen=True)
    if in_block is not None:
        sizes = replace(sizes, constexprs={**sizes.constexprs, "in_block": in_block})
    empty = {"output": np.full((batch + 1, rows, width_out), np.nan, TYPES[output])}
    module = "mtp_plugins.skinny_product.kernel"
    got = worker.call(run_in_worker, product, module, "skinny_product", sizes, x, empty, change)["output"]
    assert isinstance(got, np.ndarray)
    assert np.isnan(got[batch:].astype(np.float32)).all(), "rows behind the last one were written"
    return got[:batch]


def run_in_worker(product: Product | None, *arguments: Any) -> Arrays:
    """`run_kernel` with another product of tiles; in a worker."""
    with pytest.MonkeyPatch.context() as patch:
        if product is not None:
            patch.setattr(np, "matmul", product)
        return run_kernel(*arguments)


def same_sums(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A product whose elements are all the same order of sums, as those of a device's matrix instructions."""
    terms = np.ascontiguousarray(a[:, None, :] * b.T[None])
    return np.asarray(terms.sum(axis=-1, dtype=dtype))


def sums_by_place(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A product that adds in another order from row 8 on."""
    halves = same_sums(a[:8], b, dtype), same_sums(a[8:, ::-1], b[::-1], dtype)
    return np.concatenate(halves)


def error(got: np.ndarray, x: Arrays) -> float:
    """The largest difference from the reference, as a part of the largest value; infinite if anything is NaN."""
    want = skinny_product(x["x"].astype(np.float64), x["weight"].astype(np.float64))
    found = np.abs(got.astype(np.float64) - want).max() / np.abs(want).max()
    return float(np.nan_to_num(found, nan=np.inf))


@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize(
    ("batch", "rows", "width_in", "width_out"),
    [(1, 1, 300, 40), (2, 8, 256, 64), (1, 16, 77, 33), (3, 7, 128, 1), (1, 33, 5, 32)],
)
def test_the_kernel_equals_the_reference(
    interpreter: Worker, batch: int, rows: int, width_in: int, width_out: int, dtype: str
) -> None:
    x = feeds(batch, rows, width_in, width_out, dtype)
    assert error(run(interpreter, x), x) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_output_may_have_the_type_of_the_inputs(interpreter: Worker, dtype: str) -> None:
    x = feeds(1, 3, 130, 40, dtype)
    got = run(interpreter, x, output=dtype)
    assert got.dtype == TYPES[dtype]
    # The interpreter cuts bfloat16 off where a GPU rounds.
    assert TOLERANCE < error(got, x) < {"float16": 2**-10, "bfloat16": 2**-7}[dtype]


FAULTS = {
    "a block left out of the sum": ("range(0, width_in, in_block)", "range(in_block, width_in, in_block)"),
    "a tile of rows shifted by one": ("* row_block + tl", "* row_block + 1 + tl"),
    "a block of outputs shifted by one": ("* out_block + tl", "* out_block + 1 + tl"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_wrong_kernel_is_noticed(interpreter: Worker, tmp_path: Path, fault: str, dtype: str) -> None:
    x = feeds(1, 17, 300, 40, dtype)
    assert error(run(interpreter, x), x) < TOLERANCE
    assert error(run(interpreter, x, change=Change(tmp_path, *FAULTS[fault])), x) > FAULT, f"cannot see {fault}"


@pytest.mark.parametrize("dtype", sorted(TYPES))
def test_a_row_does_not_depend_on_their_number_or_the_rows_around_it(interpreter: Worker, dtype: str) -> None:
    x = feeds(1, 40, 300, 40, dtype)
    whole = run(interpreter, x)[0]
    for count in (1, 2, 5, 15, 16, 17):
        first = run(interpreter, x | {"x": x["x"][:, :count]})[0]
        assert same_bits(first, whole[:count]), f"{count} rows"
    others = x["x"].copy()
    others[:, 5:] *= -3
    assert same_bits(run(interpreter, x | {"x": others})[0, :5], whole[:5])
    half = BLOCK_BYTES // x["x"].dtype.itemsize // 2
    assert not same_bits(run(interpreter, x, in_block=half)[0], whole), "control: another order of sums changes bits"


def depends_on_place(worker: Worker, product: Product) -> bool:
    """Whether rows have other bits alone, in another order, or divided into sequences."""
    x = feeds(1, 40, 300, 40)
    rows, whole = x["x"][0], run(worker, x, product=product)[0]
    alone = [run(worker, x | {"x": rows[None, i : i + 1]}, product=product)[0, 0] for i in (1, 7, 13, 20, 39)]
    divided = run(worker, x | {"x": rows.reshape(4, 10, -1)}, product=product).reshape(whole.shape)
    turned = run(worker, x | {"x": rows[None, ::-1]}, product=product)[0, ::-1]
    same = (np.stack(alone), whole[[1, 7, 13, 20, 39]]), (divided, whole), (turned, whole)
    return not all(same_bits(a, b) for a, b in same)


def test_only_the_product_of_tiles_can_make_a_row_depend_on_its_place(interpreter: Worker) -> None:
    """The interpreter's own product is a BLAS, which rounds by place; that a device's does not is proved there."""
    assert not depends_on_place(interpreter, same_sums)
    assert depends_on_place(interpreter, sums_by_place), "control: this test cannot see a place"


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.isfinite(a).all()) and a.tobytes() == b.tobytes()


def test_a_verify_reads_the_weight_once() -> None:
    tiles = {rows: launch(batch=1, rows=rows, width_in=64, width_out=64).grid[0] for rows in (1, 16, 17, 256)}
    assert tiles == {1: 1, ROW_BLOCK: 1, 17: 2, 256: 16}


@pytest.mark.parametrize(("dtype", "output"), [("float32", "float32"), ("float16", "float32"), ("float16", "float16")])
def test_the_body_equals_the_reference(dtype: str, output: str) -> None:
    x = feeds(2, 3, 20, 7, dtype)
    g = GraphBuilder("SkinnyProduct")
    types = {"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16}
    for name in OPERATOR.inputs:
        shape = ir.Shape([f"{name}.{axis}" for axis in range(x[name].ndim)])
        g.inputs.append(ir.Value(name=name, type=ir.TensorType(types[dtype]), shape=shape))
    value = g.op("SkinnyProduct", *g.inputs, domain=DOMAIN, to=int(types[output]))
    value.type, value.shape = ir.TensorType(types[output]), ir.Shape(["batch", "rows", "out"])
    g.outputs.append(value)
    payload = ir.to_proto(g.model([OPERATOR.function()], [DOMAIN])).SerializeToString()
    (got,) = ort.InferenceSession(payload, providers=["CPUExecutionProvider"]).run(None, x)
    assert got.dtype == TYPES[output]
    assert error(got, x) < (TOLERANCE if output == "float32" else 1e-3)
    assert error(got, x | {"weight": x["weight"][::-1]}) > FAULT, "control: this test cannot see the weight"
