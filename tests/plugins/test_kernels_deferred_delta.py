"""The DeferredDelta kernel, interpreted, against the float64 reference and against itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from mtp_plugins.gated_delta import reference as gated_delta_reference
from tests.plugins.deferred_delta_cases import NEW_ROWS, STAGED, Sizes, difference, feeds, reference, run, written
from tests.plugins.workers import BFLOAT16, Arrays, Change, Worker

# float32 against float64: rounding stays under 1e-6 at these sizes, a fault moves more than 1e-2.
TOLERANCE = 5e-6
FAULT = 1e-2
MOST_ROWS = 16


@pytest.mark.parametrize("rows", [1, 3, 5, MOST_ROWS])
def test_the_kernel_equals_the_reference(interpreter: Worker, rows: int) -> None:
    sizes = Sizes(rows=rows, staged_rows=4)
    x = feeds(sizes)
    assert difference(run(interpreter, sizes, x), reference(sizes, x)) < TOLERANCE


def counted(rows: int = 5, staged_rows: int = 5) -> tuple[Sizes, Arrays]:
    """Every number of kept rows, each with another number of accepted ones."""
    sizes = Sizes(batch=rows + 1, rows=rows, staged_rows=staged_rows)
    x = feeds(sizes)
    x["kept_rows"] = (np.arange(rows + 1, dtype=np.int32) + 2) % (rows + 1)
    return sizes, x


def test_every_number_of_accepted_and_of_kept_rows_is_committed(interpreter: Worker) -> None:
    sizes, x = counted()
    assert set(x["accepted_rows"]) == set(x["kept_rows"]) == set(range(6))
    assert difference(run(interpreter, sizes, x), reference(sizes, x)) < TOLERANCE


def test_a_chunk_may_have_more_rows_than_a_call_leaves(interpreter: Worker) -> None:
    sizes = Sizes(rows=9, staged_rows=5)
    x = feeds(sizes) | {"kept_rows": np.array([9, 7], np.int32), "accepted_rows": np.zeros(2, np.int32)}
    got = run(interpreter, sizes, x)
    assert got["next_key"].shape[1] == 5
    assert difference(got, reference(sizes, x)) < TOLERANCE


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (1, 3), (2, 6)])
def test_value_heads_find_their_key_head(interpreter: Worker, key_heads: int, value_heads: int) -> None:
    sizes = Sizes(key_heads=key_heads, value_heads=value_heads, rows=2, staged_rows=2, value_dim=8, value_block=8)
    x = feeds(sizes)
    assert difference(run(interpreter, sizes, x), reference(sizes, x)) < TOLERANCE


@pytest.mark.parametrize("value_dim", [1, 16, 33])
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


SHARED = Sizes(key_heads=2, value_heads=4, staged_rows=4, value_dim=8, value_block=8)


def shared() -> Arrays:
    """Sequences that accept and keep some of their rows, but not all."""
    return feeds(SHARED) | {"accepted_rows": np.array([1, 3], np.int32), "kept_rows": np.array([2, 1], np.int32)}


def _tiled(x: Arrays) -> Arrays:
    """Heads for a reference without sharing, key head j serving value heads j, j + key_heads, ..."""
    return x | {name: np.tile(x[name], 2) for name in ("query", "key", "staged_key")}


FAULTS: dict[str, Callable[[Arrays], Arrays]] = {
    "one accepted row too many": lambda x: x | {"accepted_rows": x["accepted_rows"] + 1},
    "one accepted row too few": lambda x: x | {"accepted_rows": x["accepted_rows"] - 1},
    "one kept row too many": lambda x: x | {"kept_rows": x["kept_rows"] + 1},
    "no row kept": lambda x: x | {"kept_rows": 0 * x["kept_rows"]},
    "no decay in a commit": lambda x: x | {"staged_decay": 0 * x["staged_decay"]},
    "no decay in a new row": lambda x: x | {"decay": 0 * x["decay"]},
    "factors of another cycle": lambda x: x | {name: feeds(SHARED, seed=1)[name] for name in x if "staged" in name},
    "rows in another order": lambda x: x | {name: x[name][:, ::-1] for name in x if "staged" in name},
    "heads tiled, not interleaved": _tiled,
}


def test_control_a_fault_is_seen(interpreter: Worker) -> None:
    x = shared()
    got = run(interpreter, SHARED, x)
    assert difference(got, reference(SHARED, x)) < TOLERANCE
    for fault, change in FAULTS.items():
        sizes = replace(SHARED, key_heads=4) if change is _tiled else SHARED
        wrong = reference(sizes, change(x))
        wrong["next_key"] = got["next_key"]  # Tiled heads have another shape here; the other outputs decide.
        assert difference(got, wrong) > FAULT, f"this test cannot see {fault}"


KERNEL_FAULTS = {
    "an off-by-one accepted count": ("while i < count:", "while i + 1 < count:"),
    "kept_rows ignored": ("tl.minimum(tl.load(kept_rows_ptr + sequence), rows)", "0 * rows"),
    "a padding row written to the state": (
        "tl.load(kept_rows_ptr + sequence)",
        "tl.load(kept_rows_ptr + sequence) + 1",
    ),
    "a missed decay": ("state * tl.exp(decay)", "state + 0 * tl.exp(decay)"),
}


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_control_a_wrong_kernel_is_seen(interpreter: Worker, tmp_path: Path, fault: str) -> None:
    x = shared()
    wrong = run(interpreter, SHARED, x, change=Change(tmp_path, *KERNEL_FAULTS[fault]))
    assert difference(wrong, reference(SHARED, x)) > FAULT, f"this test cannot see {fault}"


def test_control_a_row_stored_without_room_is_seen(interpreter: Worker, tmp_path: Path) -> None:
    sizes = Sizes(rows=5, staged_rows=4)
    change = Change(tmp_path, "+ i, i < staged_rows,", "+ i, i >= 0,")
    with pytest.raises(AssertionError, match="written behind its end"):
        run(interpreter, sizes, feeds(sizes), change=change)


def test_an_output_row_depends_neither_on_the_rows_behind_it_nor_on_those_kept(interpreter: Worker) -> None:
    sizes = Sizes(batch=1, rows=MOST_ROWS, staged_rows=MOST_ROWS, value_heads=1, value_block=32)
    x = feeds(sizes, dtype=BFLOAT16)
    whole = run(interpreter, sizes, x)
    for rows in (1, 2, 5, 15):
        part = replace(sizes, rows=rows)
        new = {name: x[name][:, :rows] for name in NEW_ROWS}
        for kept in {0, rows - 1, rows}:
            got = run(interpreter, part, x | new | {"kept_rows": np.array([kept], np.int32)})
            for name, value in written(got, rows).items():
                if name == "present_state":
                    assert np.array_equal(value, whole[name]) == (kept == 0), f"{kept} rows kept"
                else:
                    np.testing.assert_array_equal(value, whole[name][:, :rows], err_msg=f"{name} of {rows} rows")


def test_rows_kept_at_once_give_the_bits_of_rows_accepted_later(interpreter: Worker) -> None:
    sizes = Sizes(batch=1, rows=MOST_ROWS, staged_rows=MOST_ROWS, value_heads=1, value_block=32)
    x = feeds(sizes)
    whole = run(interpreter, sizes, x)
    staged = {f"staged_{name}": whole[f"next_{name}"] for name in STAGED} | {"past_state": whole["present_state"]}
    for accepted in (0, 1, 6, 15):
        count = np.array([accepted], np.int32)
        rest = x | staged | {name: x[name][:, accepted:] for name in NEW_ROWS} | {"accepted_rows": count}
        got = run(interpreter, replace(sizes, rows=MOST_ROWS - accepted), rest)
        np.testing.assert_array_equal(got["output"], whole["output"][:, accepted:], err_msg=f"{accepted} rows")
        # Padding that must not touch the state may hold anything.
        padded = {name: x[name].copy() for name in NEW_ROWS}
        for value in padded.values():
            value[:, accepted:] = np.nan
        kept = run(interpreter, sizes, x | padded | {"kept_rows": count})
        np.testing.assert_array_equal(kept["present_state"], got["present_state"], err_msg=f"{accepted} rows")


def test_a_batch_does_not_change_a_sequence(interpreter: Worker) -> None:
    sizes = Sizes(batch=3, rows=2)
    x = feeds(sizes) | {"kept_rows": np.array([0, 2, 1], np.int32)}
    whole = written(run(interpreter, sizes, x), 2)
    for b in range(sizes.batch):
        alone = run(interpreter, replace(sizes, batch=1), {name: value[b : b + 1] for name, value in x.items()})
        for name, value in written(alone, 2).items():
            np.testing.assert_array_equal(value[0], whole[name][b], err_msg=f"{name} of sequence {b}")


def test_rows_that_are_not_accepted_are_not_read(interpreter: Worker) -> None:
    sizes = Sizes(batch=1, staged_rows=4)
    x = feeds(sizes) | {"accepted_rows": np.array([2], np.int32)}
    clean = written(run(interpreter, sizes, x), sizes.rows)
    dirty = {name: x[name].copy() for name in x if "staged" in name}
    for value in dirty.values():
        value[:, 2:] = np.nan
    for name, value in written(run(interpreter, sizes, x | dirty), sizes.rows).items():
        np.testing.assert_array_equal(value, clean[name])


class _Cycles:
    """Sequences whose rows arrive in cycles of any width, of which each keeps some."""

    def __init__(self, worker: Worker, sizes: Sizes) -> None:
        self.worker, self.sizes, self.accepted = worker, sizes, np.zeros(sizes.batch, np.int32)
        first = feeds(sizes)
        self.state = 0 * first["past_state"]
        # Nothing is staged before the first cycle, and what is not must not be read.
        self.staged = {name: np.nan * first[name] for name in first if "staged" in name}

    def outputs(self, rows: Arrays, kept: np.ndarray | None = None) -> np.ndarray:
        """Outputs of the next rows, after the accepted ones of the last call."""
        counts = {"accepted_rows": self.accepted, "kept_rows": 0 * self.accepted if kept is None else kept}
        x = rows | self.staged | {"past_state": self.state} | counts
        got = run(self.worker, replace(self.sizes, rows=rows["key"].shape[1]), x)
        self.state, self.staged = got["present_state"], {f"staged_{name}": got[f"next_{name}"] for name in STAGED}
        return got["output"]


def test_a_prefill_and_cycles_of_any_width_equal_the_plain_recurrence(interpreter: Worker) -> None:
    sizes = Sizes(batch=2, staged_rows=5, value_heads=1, value_block=32)
    random, cycles = np.random.default_rng(7), _Cycles(interpreter, sizes)
    kept: list[list[tuple[Arrays, np.ndarray]]] = [[], []]
    counts = set()
    for cycle in range(14):
        prefill = cycle in (0, 7)
        width = 8 if prefill else int(random.integers(1, 6))
        x = feeds(replace(sizes, rows=width), seed=cycle)
        rows = {name: x[name] for name in NEW_ROWS}
        valid = random.integers(0, width + 1, sizes.batch).astype(np.int32)
        output = cycles.outputs(rows, valid if prefill else None)
        cycles.accepted = 0 * valid if prefill else valid
        counts |= set() if prefill else {int(count) for count in valid}
        for b, count in enumerate(valid):
            kept[b] += [({k: v[b : b + 1, i : i + 1] for k, v in rows.items()}, output[b, i]) for i in range(count)]
    assert counts == set(range(6))
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
