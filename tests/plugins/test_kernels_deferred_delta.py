"""The DeferredDelta kernel, interpreted, against the float64 reference and against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from mtp_plugins.gated_delta import reference as gated_delta_reference
from tests.plugins.deferred_delta_cases import NEW_ROWS, STAGED, Sizes, difference, feeds, reference, run
from tests.plugins.workers import BFLOAT16, Arrays, Worker

# float32 against float64: rounding stays under 1e-6 at these sizes, a fault moves more than 1e-2.
TOLERANCE = 5e-6
FAULT = 1e-2
MOST_ROWS = 16


@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS])
@pytest.mark.parametrize("staged_rows", [1, 4])
def test_the_kernel_equals_the_reference(interpreter: Worker, rows: int, staged_rows: int) -> None:
    sizes = Sizes(rows=rows, staged_rows=staged_rows)
    x = feeds(sizes)
    assert difference(run(interpreter, sizes, x), reference(sizes, x)) < TOLERANCE


def test_every_number_of_accepted_rows_is_committed(interpreter: Worker) -> None:
    sizes = Sizes(batch=6, rows=1, staged_rows=5, value_heads=1)
    x = feeds(sizes)
    assert set(x["accepted_rows"]) == set(range(6))
    assert difference(run(interpreter, sizes, x), reference(sizes, x)) < TOLERANCE


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 4), (1, 3), (2, 6)])
def test_value_heads_find_their_key_head(interpreter: Worker, key_heads: int, value_heads: int) -> None:
    sizes = Sizes(key_heads=key_heads, value_heads=value_heads, rows=2, staged_rows=2, value_dim=8, value_block=8)
    x = feeds(sizes)
    assert difference(run(interpreter, sizes, x), reference(sizes, x)) < TOLERANCE


@pytest.mark.parametrize("value_dim", [1, 7, 16, 33])
def test_a_last_block_may_be_part_of_one(interpreter: Worker, value_dim: int) -> None:
    sizes = Sizes(value_dim=value_dim, rows=2, value_heads=1)
    x = feeds(sizes)
    assert difference(run(interpreter, sizes, x, in_place=False), reference(sizes, x)) < TOLERANCE


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_short_floats_are_read_exactly(interpreter: Worker, dtype: np.dtype) -> None:
    sizes = Sizes()
    x = feeds(sizes, dtype=dtype)
    got = run(interpreter, sizes, x)
    assert got["next_value"].dtype == dtype
    assert difference(got, reference(sizes, x)) < TOLERANCE
    short = run(interpreter, sizes, x, output=dtype)["output"].astype(np.float64)
    # The interpreter cuts bfloat16 off where a GPU rounds (test_kernels_ptx.py): up to one unit in the last place.
    unit = np.abs(got["output"]) * float(ml_dtypes.finfo(dtype).eps) + TOLERANCE
    assert (np.abs(short - got["output"]) <= unit).all()


def test_tiny_keys_keep_the_epsilon_inside_the_root(interpreter: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = Sizes()
    x = feeds(sizes, scale=3e-4)
    got = run(interpreter, sizes, x)
    assert difference(got, reference(sizes, x)) < TOLERANCE

    def outside(values: np.ndarray) -> np.ndarray:
        return values / (np.sqrt(np.square(values).sum(-1, keepdims=True)) + 1e-6)

    monkeypatch.setattr(gated_delta_reference, "unit_rows", outside)
    assert difference(got, reference(sizes, x)) > FAULT, "control: this test cannot see where the epsilon is"


def _tiled(x: Arrays) -> Arrays:
    """Heads for a reference without sharing, key head j serving value heads j, j + key_heads, ..."""
    return x | {name: np.tile(x[name], 2) for name in ("query", "key", "staged_key")}


FAULTS: dict[str, Callable[[Arrays], Arrays]] = {
    "one row too many": lambda x: x | {"accepted_rows": x["accepted_rows"] + 1},
    "one row too few": lambda x: x | {"accepted_rows": x["accepted_rows"] - 1},
    "no decay in a commit": lambda x: x | {"staged_decay": 0 * x["staged_decay"]},
    "no decay in a new row": lambda x: x | {"decay": 0 * x["decay"]},
    "factors of another cycle": lambda x: x | {name: feeds(SHARED, seed=1)[name] for name in x if "staged" in name},
    "rows in another order": lambda x: x | {name: x[name][:, ::-1] for name in x if "staged" in name},
    "counts of another sequence": lambda x: x | {"accepted_rows": x["accepted_rows"][::-1]},
    "heads tiled, not interleaved": _tiled,
}
SHARED = Sizes(key_heads=2, value_heads=4, staged_rows=4, value_dim=8, value_block=8)


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_is_seen(interpreter: Worker, fault: str) -> None:
    x = feeds(SHARED) | {"accepted_rows": np.array([1, 3], np.int32)}
    got = run(interpreter, SHARED, x)
    assert difference(got, reference(SHARED, x)) < TOLERANCE
    sizes = replace(SHARED, key_heads=4) if FAULTS[fault] is _tiled else SHARED
    wrong = reference(sizes, FAULTS[fault](x))
    wrong["next_key"] = got["next_key"]  # Tiled heads have another shape here; the other outputs decide.
    assert difference(got, wrong) > FAULT, f"this test cannot see {fault}"


def test_an_output_row_does_not_depend_on_the_rows_behind_it(interpreter: Worker) -> None:
    sizes = Sizes(batch=1, rows=MOST_ROWS, value_heads=1, value_block=32)
    x = feeds(sizes, dtype=BFLOAT16)
    whole = run(interpreter, sizes, x)
    for rows in range(1, MOST_ROWS):
        part = run(interpreter, replace(sizes, rows=rows), x | {name: x[name][:, :rows] for name in NEW_ROWS})
        for name, value in part.items():
            want = whole[name] if name == "present_state" else whole[name][:, :rows]
            np.testing.assert_array_equal(value, want, err_msg=f"{name} of {rows} rows")


def test_an_output_row_does_not_depend_on_how_many_rows_before_it_were_committed(interpreter: Worker) -> None:
    sizes = Sizes(batch=1, rows=MOST_ROWS, value_heads=1, value_block=32)
    x = feeds(sizes)
    whole = run(interpreter, sizes, x)
    staged = {f"staged_{name}": whole[f"next_{name}"] for name in STAGED} | {"past_state": whole["present_state"]}
    for accepted in range(MOST_ROWS):
        rest = staged | {name: x[name][:, accepted:] for name in NEW_ROWS}
        rest["accepted_rows"] = np.array([accepted], np.int32)
        got = run(interpreter, replace(sizes, rows=MOST_ROWS - accepted, staged_rows=MOST_ROWS), rest)
        np.testing.assert_array_equal(got["output"], whole["output"][:, accepted:], err_msg=f"{accepted} rows")


def test_a_batch_does_not_change_a_sequence(interpreter: Worker) -> None:
    sizes = Sizes(batch=3, rows=2)
    x = feeds(sizes)
    whole = run(interpreter, sizes, x)
    for b in range(sizes.batch):
        alone = run(interpreter, replace(sizes, batch=1), {name: value[b : b + 1] for name, value in x.items()})
        for name, value in alone.items():
            np.testing.assert_array_equal(value[0], whole[name][b], err_msg=f"{name} of sequence {b}")


def test_rows_that_are_not_accepted_are_not_read(interpreter: Worker) -> None:
    sizes = Sizes(batch=1, staged_rows=4)
    x = feeds(sizes) | {"accepted_rows": np.array([2], np.int32)}
    clean = run(interpreter, sizes, x)
    dirty = {name: x[name].copy() for name in x if "staged" in name}
    for value in dirty.values():
        value[:, 2:] = np.nan
    for name, value in run(interpreter, sizes, x | dirty).items():
        np.testing.assert_array_equal(value, clean[name])


class _Cycles:
    """Sequences whose rows arrive in cycles, of which each keeps some."""

    def __init__(self, worker: Worker, sizes: Sizes) -> None:
        self.worker, self.sizes, self.accepted = worker, sizes, np.zeros(sizes.batch, np.int32)
        first = feeds(replace(sizes, staged_rows=1))
        self.state = 0 * first["past_state"]
        # Nothing is staged before the first cycle, and what is not must not be read.
        self.staged = {name: np.nan * first[name] for name in first if "staged" in name}

    def outputs(self, rows: Arrays) -> np.ndarray:
        """Outputs of the next rows, after the accepted ones of the last call."""
        staged_rows = self.staged["staged_key"].shape[1]
        sizes = replace(self.sizes, rows=rows["key"].shape[1], staged_rows=staged_rows)
        x = rows | self.staged | {"past_state": self.state, "accepted_rows": self.accepted}
        got = run(self.worker, sizes, x)
        self.state, self.staged = got["present_state"], {f"staged_{name}": got[f"next_{name}"] for name in STAGED}
        return got["output"]


def test_twenty_cycles_equal_the_plain_recurrence(interpreter: Worker) -> None:
    sizes = Sizes(batch=2, value_heads=1, value_block=32)
    random, cycles = np.random.default_rng(7), _Cycles(interpreter, sizes)
    kept: list[list[tuple[Arrays, np.ndarray]]] = [[], []]
    counts = set()
    for cycle in range(20):
        width = int(random.integers(1, 6))
        rows = {
            name: value for name, value in feeds(replace(sizes, rows=width), seed=cycle).items() if name in NEW_ROWS
        }
        output = cycles.outputs(rows)
        cycles.accepted = random.integers(0, width + 1, sizes.batch).astype(np.int32)
        counts |= {(width, int(count)) for count in cycles.accepted}
        for b, count in enumerate(cycles.accepted):
            kept[b] += [({k: v[b : b + 1, i : i + 1] for k, v in rows.items()}, output[b, i]) for i in range(count)]
    assert {count for _, count in counts} == set(range(6))
    for b, rows_kept in enumerate(kept):
        x = {name: np.concatenate([row[name] for row, _ in rows_kept], axis=1) for name in NEW_ROWS}
        got = np.stack([output for _, output in rows_kept])
        plain = replace(sizes, batch=1, rows=len(rows_kept), staged_rows=1)
        start = feeds(plain) | x | {"past_state": 0 * cycles.state[:1], "accepted_rows": np.zeros(1, np.int32)}
        assert np.abs(got - reference(plain, start)["output"][0]).max() < TOLERANCE, f"sequence {b}"
        single, ones = _Cycles(interpreter, replace(sizes, batch=1)), []
        for row, _ in rows_kept:
            ones.append(single.outputs(row)[0, 0])
            single.accepted = np.ones(1, np.int32)
        np.testing.assert_array_equal(got, np.stack(ones), err_msg="one row a cycle, bit for bit")
