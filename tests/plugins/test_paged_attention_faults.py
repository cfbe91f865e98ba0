"""Deliberate faults that the comparison of the PagedAttention kernels with their reference must see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.plugins.interpreted import Run, attend, interpreted
from tests.plugins.paged import TOLERANCE, Arrays, Case, error, paged, reference, sequences

__all__ = ["interpreted"]

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
    "no causal mask in the block": ("tl.load(lengths + sequence) + row + 1", "tl.load(lengths + sequence) + M"),
    "one position hidden": ("k, v, key < end, top", "k, v, (key < end) & (key != 200), top"),
    "combination without the maxima": (
        "weights = tl.exp2(tops - new_top)",
        "weights = tl.where(split < count, 1.0, 0.0)",
    ),
    "sums without the maxima": ("factor + tl.sum(weights, 1)", "1.0 + tl.sum(weights, 1)"),
    "last split left out": ("tl.minimum(position // SPLIT + 1, splits)", "tl.maximum(position // SPLIT, 1)"),
}


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("fault", INPUT_FAULTS)
def test_control_a_wrong_input_is_noticed(interpreted: Run, fault: str, dtype: str) -> None:
    x = _inputs(dtype)
    wrong = error(interpreted(attend, INPUT_FAULTS[fault](x), dtype), reference(x))
    assert np.inf > wrong > 10 * TOLERANCE[dtype], f"this test cannot see {fault}"


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_control_a_wrong_kernel_is_noticed(interpreted: Run, tmp_path: Path, fault: str, dtype: str) -> None:
    x, change = _inputs(dtype), (tmp_path, *KERNEL_FAULTS[fault])
    assert error(interpreted(attend, x, dtype), reference(x)) < TOLERANCE[dtype]
    wrong = error(interpreted(attend, x, dtype, change=change), reference(x))
    assert np.inf > wrong > 10 * TOLERANCE[dtype], f"this test cannot see {fault}"


def _inputs(dtype: str) -> Arrays:
    case = Case(lengths=LENGTHS, heads=2, kv_heads=1, head_dim=32, dtype=dtype)
    x = sequences(case)
    # The key at 200, a row's own and the next take most of the weight, so that none can be missing unnoticed.
    own = np.arange(LENGTHS[0], LENGTHS[0] + case.rows)
    favoured = x["key"][:, own] + x["key"][:, np.minimum(own + 1, own[-1])] + x["key"][:, 200:201]
    x["query"] += np.tile(favoured[:, :, 0], case.heads)
    return paged(case, x)
