"""The DeferredConv kernel, interpreted, against the float64 reference and against itself."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from mtp_plugins.deferred_conv import OPERATOR
from mtp_plugins.deferred_conv.launch import launch
from mtp_plugins.deferred_conv.reference import deferred_conv
from tests.plugins.workers import BFLOAT16, Arrays, Worker, run_kernel

BATCH, CHANNELS, TAPS = 5, 11, 4
# float32 against float64: rounding stays under 1e-6, a wrong row moves more than 1e-2.
TOLERANCE = 5e-6
FAULT = 1e-2
MOST_ROWS = 16


def feeds(
    *, rows: int = 3, staged_rows: int = 4, taps: int = TAPS, dtype: np.dtype | type = np.float32, seed: int = 0
) -> Arrays:
    """Inputs in the order of the operator; the sequences keep different numbers of rows."""
    draw = np.random.default_rng(seed).standard_normal
    shapes = {
        "x": (BATCH, rows, CHANNELS),
        "weight": (CHANNELS, 1, taps),
        "past_state": (BATCH, taps - 1, CHANNELS),
        "staged_x": (BATCH, staged_rows, CHANNELS),
    }
    counts = np.arange(BATCH) % (staged_rows + 1)
    return {name: draw(shape).astype(dtype) for name, shape in shapes.items()} | {
        "accepted_rows": counts.astype(np.int32)
    }


def run(
    worker: Worker, x: Arrays, *, in_place: bool = True, output: np.dtype | type = np.float32, block: int = 16
) -> Arrays:
    """Outputs of the kernel."""
    batch, rows, channels = x["x"].shape
    outputs: dict[str, np.ndarray | str] = {
        "output": np.full(x["x"].shape, np.nan, output),
        "present_state": "past_state" if in_place else np.full_like(x["past_state"], np.nan),
        "next_x": np.full_like(x["x"], np.nan),
    }
    sizes = launch(
        batch=batch,
        rows=rows,
        staged_rows=x["staged_x"].shape[1],
        channels=channels,
        taps=x["weight"].shape[2],
        channel_block=block,
    )
    arguments = {name: x[name] for name in OPERATOR.inputs} | outputs
    results = worker.call(run_kernel, "mtp_plugins.deferred_conv.kernel", "deferred_conv", sizes, arguments)
    return {name: results[name] for name in OPERATOR.outputs}


def reference(x: Arrays) -> Arrays:
    """Outputs of the reference in float64."""
    wide = {name: value.astype(np.float64) for name, value in x.items()}
    rows = [
        deferred_conv(wide["x"][b], wide["weight"], wide["past_state"][b], wide["staged_x"][b], int(count))
        for b, count in enumerate(x["accepted_rows"])
    ]
    return dict(zip(OPERATOR.outputs, (np.stack(part) for part in zip(*rows, strict=True)), strict=True))


def difference(got: Arrays, want: Arrays) -> float:
    """The largest absolute difference over all outputs; NaN counts as infinite."""
    worst = [np.abs(got[name].astype(np.float64) - want[name]).max(initial=0.0) for name in OPERATOR.outputs]
    return float(np.nan_to_num(np.max(worst), nan=np.inf))


@pytest.mark.parametrize(("rows", "block", "in_place"), [(1, 4, True), (2, 8, False), (4, 16, True), (16, 16, True)])
def test_the_kernel_equals_the_reference(interpreter: Worker, rows: int, block: int, in_place: bool) -> None:
    x = feeds(rows=rows)
    assert set(x["accepted_rows"]) == set(range(5)), "every number of accepted rows, below and above the kernel's width"
    assert difference(run(interpreter, x, in_place=in_place, block=block), reference(x)) < TOLERANCE


@pytest.mark.parametrize("taps", [2, 3, 5])
def test_the_width_of_the_kernel_is_free(interpreter: Worker, taps: int) -> None:
    x = feeds(taps=taps)
    assert difference(run(interpreter, x), reference(x)) < TOLERANCE


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_short_floats_are_read_exactly_and_the_state_keeps_their_bits(interpreter: Worker, dtype: np.dtype) -> None:
    x = feeds(dtype=dtype)
    got = run(interpreter, x)
    assert got["present_state"].dtype == dtype
    assert difference(got, reference(x)) < TOLERANCE
    short = run(interpreter, x, output=dtype)["output"].astype(np.float64)
    unit = np.abs(got["output"]) * float(ml_dtypes.finfo(dtype).eps) + TOLERANCE
    assert (np.abs(short - got["output"]) <= unit).all()


FAULTS: dict[str, Callable[[Arrays], Arrays]] = {
    "one row too many": lambda x: x | {"accepted_rows": x["accepted_rows"] + 1},
    "one row too few": lambda x: x | {"accepted_rows": np.maximum(x["accepted_rows"] - 1, 0)},
    "rows of another cycle": lambda x: x | {"staged_x": feeds(seed=1)["staged_x"]},
    "an empty state": lambda x: x | {"past_state": 0 * x["past_state"]},
    "taps in another order": lambda x: x | {"weight": x["weight"][..., ::-1]},
    "counts of another sequence": lambda x: x | {"accepted_rows": x["accepted_rows"][::-1]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_is_seen(interpreter: Worker, fault: str) -> None:
    x = feeds(staged_rows=6)
    got = run(interpreter, x)
    assert difference(got, reference(x)) < TOLERANCE
    wrong = FAULTS[fault](x)
    assert difference(got, reference(wrong)) > FAULT, f"this test cannot see {fault}"


def test_an_output_row_depends_neither_on_the_rows_behind_it_nor_on_what_was_committed(interpreter: Worker) -> None:
    x = {name: v if name == "weight" else v[:1] for name, v in feeds(rows=MOST_ROWS, staged_rows=1).items()}
    whole = run(interpreter, x)
    staged = {"staged_x": whole["next_x"], "past_state": whole["present_state"]}
    for rows in range(1, MOST_ROWS):
        first = run(interpreter, x | {"x": x["x"][:, :rows]})["output"]
        np.testing.assert_array_equal(first, whole["output"][:, :rows], err_msg=f"the first {rows} rows")
        rest = x | staged | {"x": x["x"][:, rows:], "accepted_rows": np.full(1, rows, np.int32)}
        last = run(interpreter, rest)["output"]
        np.testing.assert_array_equal(last, whole["output"][:, rows:], err_msg=f"the rows behind {rows} committed ones")


def test_a_batch_does_not_change_a_sequence(interpreter: Worker) -> None:
    x = feeds()
    whole = run(interpreter, x)
    for b in range(BATCH):
        alone = run(interpreter, {name: v if name == "weight" else v[b : b + 1] for name, v in x.items()})
        for name, value in alone.items():
            np.testing.assert_array_equal(value[0], whole[name][b], err_msg=f"{name} of sequence {b}")


def test_rows_that_are_not_accepted_are_not_read(interpreter: Worker) -> None:
    x = feeds()
    clean = run(interpreter, x)
    dirty = x["staged_x"].copy()
    for b, count in enumerate(x["accepted_rows"]):
        dirty[b, count:] = np.nan
    for name, value in run(interpreter, x | {"staged_x": dirty}).items():
        np.testing.assert_array_equal(value, clean[name])


def test_twenty_cycles_equal_one_convolution(interpreter: Worker) -> None:
    batch, random = 2, np.random.default_rng(3)
    x = {name: v if name == "weight" else v[:batch] for name, v in feeds(staged_rows=1).items()}
    x |= {"past_state": 0 * x["past_state"], "staged_x": np.nan * x["staged_x"]}
    x["accepted_rows"] = np.zeros(batch, np.int32)
    kept: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(batch)]
    for cycle in range(20):
        x["x"] = feeds(rows=int(random.integers(1, 6)), seed=cycle)["x"][:batch]
        got = run(interpreter, x)
        accepted = random.integers(0, x["x"].shape[1] + 1, batch).astype(np.int32)
        for b, count in enumerate(accepted):
            kept[b] += [(x["x"][b, i], got["output"][b, i]) for i in range(count)]
        x |= {"past_state": got["present_state"], "staged_x": got["next_x"], "accepted_rows": accepted}
    for b, rows in enumerate(kept):
        raw, output = (np.stack(part) for part in zip(*rows, strict=True))
        want, _, _ = deferred_conv(raw, x["weight"], np.zeros((TAPS - 1, CHANNELS)), raw, 0)
        assert np.abs(output - want).max() < TOLERANCE, f"sequence {b}"
