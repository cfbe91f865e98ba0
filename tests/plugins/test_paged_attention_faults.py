"""Deliberate faults that the comparison of the PagedAttention kernels with their reference must see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.plugins.paged import TOLERANCE, Case, attend, error, paged, reference, sequences
from tests.plugins.workers import Arrays, Change, Worker

# Sequences of one length, so that no fault is seen only by reading what is not there; two splits.
LENGTHS = (300, 300)


def _stale_page(x: Arrays) -> Arrays:
    """The page that holds positions 288 to 303 keeps what lay in it before the rows of the first sequence."""
    pages = x["value_pages"].copy()
    pages[x["block_table"][0, 18]] = np.random.default_rng(1).standard_normal(pages.shape[1:])
    return x | {"value_pages": pages}


INPUT_FAULTS: dict[str, Callable[[Arrays], Arrays]] = {
    "stale page": _stale_page,
    "length one too small": lambda x: x | {"lengths": x["lengths"] - 1},
    "rows of the table swapped": lambda x: x | {"block_table": x["block_table"][::-1]},
}
KERNEL_FAULTS = {
    "no causal mask in the block": (
        "tl.load(lengths_ptr + sequence) + row + 1",
        "tl.load(lengths_ptr + sequence) + rows",
    ),
    "one position hidden": ("k, v, key < end, top", "k, v, (key < end) & (key != 200), top"),
    "combination without the maxima": (
        "weights = tl.exp2(tops - new_top)",
        "weights = tl.where(split < count, 1.0, 0.0)",
    ),
    "sums without the maxima": ("tl.fma(total, factor, tl.sum(weights, 1))", "total + tl.sum(weights, 1)"),
    "last split left out": ("tl.minimum(position // split_size + 1, splits)", "tl.maximum(position // split_size, 1)"),
}


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_control_a_wrong_input_is_noticed(interpreter: Worker, dtype: str) -> None:
    x = _inputs(dtype)
    want = reference(x)
    assert error(attend(interpreter, x, dtype), want) < TOLERANCE[dtype]
    for fault, change in INPUT_FAULTS.items():
        wrong = error(attend(interpreter, change(x), dtype), want)
        assert np.inf > wrong > 10 * TOLERANCE[dtype], f"this test cannot see {fault}"


# Every fault in the widest tolerance; the others only differ in the type of the inputs.
@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_control_a_wrong_kernel_is_noticed(interpreter: Worker, tmp_path: Path, fault: str) -> None:
    x, change = _inputs("bfloat16"), Change(tmp_path, *KERNEL_FAULTS[fault])
    wrong = error(attend(interpreter, x, "bfloat16", change=change), reference(x))
    assert np.inf > wrong > 10 * TOLERANCE["bfloat16"], f"this test cannot see {fault}"


def _inputs(dtype: str) -> Arrays:
    case = Case(lengths=LENGTHS, heads=2, kv_heads=1, head_dim=32, dtype=dtype)
    x = sequences(case)
    # The key at 200, a row's own and the next take most of the weight, so that none can be missing unnoticed.
    own = np.arange(LENGTHS[0], LENGTHS[0] + case.rows)
    favoured = x["key"][:, own] + x["key"][:, np.minimum(own + 1, own[-1])] + x["key"][:, 200:201]
    x["query"] += np.tile(favoured[:, :, 0], case.heads)
    return paged(case, x)
