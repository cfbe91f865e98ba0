"""The DeferredConv kernel, interpreted, against the float64 reference and against itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mtp_plugins.deferred_conv import OPERATOR
from mtp_plugins.deferred_conv.launch import launch
from mtp_plugins.deferred_conv.reference import deferred_conv
from tests.plugins.workers import BFLOAT16, Arrays, Change, Worker, run_kernel

BATCH, CHANNELS, TAPS = 5, 11, 4
# float32 against float64: rounding stays under 1e-6, a wrong row moves more than 1e-2.
TOLERANCE = 5e-6
FAULT = 1e-2
MOST_ROWS = 16


def feeds(
    *, rows: int = 3, staged_rows: int = 4, taps: int = TAPS, dtype: np.dtype | type = np.float32, seed: int = 0
) -> Arrays:
    """Inputs in the order of the operator; the sequences accept different numbers of rows and keep no new ones."""
    draw = np.random.default_rng(seed).standard_normal
    shapes = {
        "x": (BATCH, rows, CHANNELS),
        "weight": (CHANNELS, 1, taps),
        "past_state": (BATCH, taps - 1, CHANNELS),
        "staged_x": (BATCH, staged_rows, CHANNELS),
    }
    counts = np.arange(BATCH) % (staged_rows + 1)
    x = {name: draw(shape).astype(dtype) for name, shape in shapes.items()}
    return x | {"accepted_rows": counts.astype(np.int32), "kept_rows": np.zeros(BATCH, np.int32)}


def run(
    worker: Worker,
    x: Arrays,
    *,
    in_place: bool = True,
    output: np.dtype | type = np.float32,
    block: int = 16,
    change: Change | None = None,
) -> Arrays:
    """Outputs of the kernel."""
    batch, rows, channels = x["x"].shape
    staged_rows = x["staged_x"].shape[1]
    outputs: dict[str, np.ndarray | str] = {
        "output": np.full(x["x"].shape, np.nan, output),
        "present_state": "past_state" if in_place else np.full_like(x["past_state"], np.nan),
        # Room for one sequence more than there are.
        "next_x": np.full((batch + 1, staged_rows, channels), np.nan, x["x"].dtype),
    }
    sizes = launch(
        batch=batch,
        rows=rows,
        staged_rows=staged_rows,
        channels=channels,
        taps=x["weight"].shape[2],
        channel_block=block,
    )
    inputs = {name: x[name] for name in OPERATOR.inputs}
    results = worker.call(
        run_kernel, "mtp_plugins.deferred_conv.kernel", "deferred_conv", sizes, inputs, outputs, change
    )
    results["next_x"], behind = np.split(results["next_x"], [batch])
    assert np.isnan(behind.astype(np.float32)).all(), "next_x was written behind its end"
    return {name: results[name] for name in OPERATOR.outputs}


def reference(x: Arrays) -> Arrays:
    """Outputs of the reference in float64."""
    wide = {name: value.astype(np.float64) for name, value in x.items()}
    rows = [
        deferred_conv(wide["x"][b], wide["weight"], wide["past_state"][b], wide["staged_x"][b], int(count), int(kept))
        for b, (count, kept) in enumerate(zip(x["accepted_rows"], x["kept_rows"], strict=True))
    ]
    return dict(zip(OPERATOR.outputs, (np.stack(part) for part in zip(*rows, strict=True)), strict=True))


def difference(got: Arrays, want: Arrays) -> float:
    """The largest absolute difference over all outputs, next_x up to the last new row; NaN counts as infinite."""
    pairs = [(got[name][:, : want[name].shape[1]], want[name]) for name in OPERATOR.outputs]
    worst = [np.abs(ours.astype(np.float64) - theirs).max(initial=0.0) for ours, theirs in pairs]
    return float(np.nan_to_num(np.max(worst), nan=np.inf))


def written(got: Arrays, rows: int) -> Arrays:
    """Outputs without the rows of next_x behind the new ones, which mean nothing."""
    return got | {"next_x": got["next_x"][:, :rows]}


def alone(x: Arrays, batch: int = 1) -> Arrays:
    """The first sequences of a call."""
    return {name: value if name == "weight" else value[:batch] for name, value in x.items()}


@pytest.mark.parametrize(("rows", "block", "in_place"), [(1, 4, True), (4, 8, False), (16, 16, True)])
def test_the_kernel_equals_the_reference(interpreter: Worker, rows: int, block: int, in_place: bool) -> None:
    x = feeds(rows=rows)
    assert set(x["accepted_rows"]) == set(range(5)), "every number of accepted rows, below and above the kernel's width"
    assert difference(run(interpreter, x, in_place=in_place, block=block), reference(x)) < TOLERANCE


@pytest.mark.parametrize("rows", [2, 5, 9])
def test_every_number_of_kept_rows_is_committed(interpreter: Worker, rows: int) -> None:
    """Fewer and more rows than the state has, and than a call leaves."""
    x = feeds(rows=rows) | {"kept_rows": (rows - np.arange(BATCH, dtype=np.int32)) % (rows + 1)}
    assert difference(run(interpreter, x), reference(x)) < TOLERANCE


@pytest.mark.parametrize("taps", [2, 5])
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


def kept() -> Arrays:
    """Sequences that accept and keep some of their rows, but not all."""
    return feeds(rows=4, staged_rows=6) | {"kept_rows": np.array([1, 2, 3, 2, 0], np.int32)}


FAULTS: dict[str, Callable[[Arrays], Arrays]] = {
    "one accepted row too many": lambda x: x | {"accepted_rows": x["accepted_rows"] + 1},
    "one accepted row too few": lambda x: x | {"accepted_rows": np.maximum(x["accepted_rows"] - 1, 0)},
    "one kept row too many": lambda x: x | {"kept_rows": x["kept_rows"] + 1},
    "no row kept": lambda x: x | {"kept_rows": 0 * x["kept_rows"]},
    "rows of another cycle": lambda x: x | {"staged_x": feeds(seed=1, staged_rows=6)["staged_x"]},
    "an empty state": lambda x: x | {"past_state": 0 * x["past_state"]},
    "taps in another order": lambda x: x | {"weight": x["weight"][..., ::-1]},
}


def test_control_a_fault_is_seen(interpreter: Worker) -> None:
    x = kept()
    got = run(interpreter, x)
    assert difference(got, reference(x)) < TOLERANCE
    for fault, change in FAULTS.items():
        assert difference(got, reference(change(x))) > FAULT, f"this test cannot see {fault}"


KERNEL_FAULTS = {
    "an off-by-one accepted count": ("staged_rows)\n    kept", "staged_rows) - 1\n    kept"),
    "kept_rows ignored": ("tl.minimum(tl.load(kept_rows_ptr + sequence), rows)", "0 * rows"),
    "a padding row written to the state": (
        "tl.load(kept_rows_ptr + sequence)",
        "tl.load(kept_rows_ptr + sequence) + 1",
    ),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_control_a_wrong_kernel_is_seen(interpreter: Worker, tmp_path: Path, fault: str) -> None:
    x = kept()
    x["accepted_rows"] = np.maximum(x["accepted_rows"], 1)
    wrong = run(interpreter, x, change=Change(tmp_path, *KERNEL_FAULTS[fault]))
    assert difference(wrong, reference(x)) > FAULT, f"this test cannot see {fault}"


def test_control_a_row_stored_without_room_is_seen(interpreter: Worker, tmp_path: Path) -> None:
    change = Change(tmp_path, "(i < staged_rows)", "(i >= 0)")
    with pytest.raises(AssertionError, match="written behind its end"):
        run(interpreter, feeds(rows=5), change=change)


def test_an_output_row_depends_neither_on_the_rows_behind_it_nor_on_what_was_kept(interpreter: Worker) -> None:
    x = alone(feeds(rows=MOST_ROWS, staged_rows=MOST_ROWS))
    whole = run(interpreter, x)
    staged = {"staged_x": whole["next_x"], "past_state": whole["present_state"]}
    for rows in (1, 2, 3, 7, 15):
        count = {"accepted_rows": np.full(1, rows, np.int32)}
        first = run(interpreter, x | {"x": x["x"][:, :rows], "kept_rows": count["accepted_rows"]})
        np.testing.assert_array_equal(first["output"], whole["output"][:, :rows], err_msg=f"the first {rows} rows")
        last = run(interpreter, x | staged | {"x": x["x"][:, rows:]} | count)
        np.testing.assert_array_equal(last["output"], whole["output"][:, rows:], err_msg=f"behind {rows} rows")
        np.testing.assert_array_equal(last["present_state"], first["present_state"], err_msg="kept at once or later")


def test_a_batch_does_not_change_a_sequence(interpreter: Worker) -> None:
    x = kept()
    whole = written(run(interpreter, x), 4)
    for b in range(BATCH):
        one = run(interpreter, {name: v if name == "weight" else v[b : b + 1] for name, v in x.items()})
        for name, value in written(one, 4).items():
            np.testing.assert_array_equal(value[0], whole[name][b], err_msg=f"{name} of sequence {b}")


def test_rows_that_are_not_accepted_are_not_read(interpreter: Worker) -> None:
    x = feeds()
    clean = written(run(interpreter, x), 3)
    dirty = x["staged_x"].copy()
    for b, count in enumerate(x["accepted_rows"]):
        dirty[b, count:] = np.nan
    for name, value in written(run(interpreter, x | {"staged_x": dirty}), 3).items():
        np.testing.assert_array_equal(value, clean[name])


def test_a_prefill_and_cycles_of_any_width_equal_one_convolution(interpreter: Worker) -> None:
    batch, random = 2, np.random.default_rng(3)
    x = alone(feeds(staged_rows=5), batch)
    x |= {"past_state": 0 * x["past_state"], "staged_x": np.nan * x["staged_x"]}
    x["accepted_rows"] = np.zeros(batch, np.int32)
    rows_kept: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(batch)]
    for cycle in range(14):
        prefill = cycle in (0, 7)
        width = 8 if prefill else int(random.integers(1, 6))
        valid = random.integers(0, width + 1, batch).astype(np.int32)
        x |= {"x": feeds(rows=width, seed=cycle)["x"][:batch], "kept_rows": valid if prefill else 0 * valid}
        got = run(interpreter, x)
        for b, count in enumerate(valid):
            rows_kept[b] += [(x["x"][b, i], got["output"][b, i]) for i in range(count)]
        accepted = 0 * valid if prefill else valid
        x |= {"past_state": got["present_state"], "staged_x": got["next_x"], "accepted_rows": accepted}
    for b, rows in enumerate(rows_kept):
        raw, output = (np.stack(part) for part in zip(*rows, strict=True))
        want, _, _ = deferred_conv(raw, x["weight"], np.zeros((TAPS - 1, CHANNELS)), raw, 0, 0)
        assert np.abs(output - want).max() < TOLERANCE, f"sequence {b}"
