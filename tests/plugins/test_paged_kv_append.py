"""The PagedKvAppend kernel against its reference, with controls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mtp_plugins.paged_kv_append.reference import paged_kv_append
from tests.plugins.interpreted import Run, append, call, interpreted
from tests.plugins.paged import Arrays, Case, Layout, paged, sequences

__all__ = ["interpreted"]

INPUTS = ("key", "value", "key_pages", "value_pages", "block_table", "lengths")


def inputs(case: Case, layout: Layout) -> tuple[Arrays, Arrays]:
    """The inputs of a call, whose new slots are still NaN, and those of the attention after it."""
    x = sequences(case, shared_rows=layout.shared * layout.page_size)
    after = paged(case, x, layout)
    before = {name: after[name].copy() for name in ("key_pages", "value_pages", "block_table", "lengths")}
    new = {name: np.empty((len(case.lengths), case.rows, case.kv_heads * case.head_dim)) for name in ("key", "value")}
    for b, length in enumerate(case.lengths):
        positions = np.arange(length, length + case.rows)
        places = after["block_table"][b, positions // layout.page_size], positions % layout.page_size
        for name in new:
            new[name][b] = x[name][b, positions].reshape(case.rows, -1)
            before[f"{name}_pages"][places] = np.nan
    return new | before, after


def reference(x: Arrays) -> list[np.ndarray]:
    return [paged_kv_append(x[name], x[f"{name}_pages"], x["block_table"], x["lengths"]) for name in ("key", "value")]


def equal(got: tuple[np.ndarray, ...], want: list[np.ndarray]) -> bool:
    """Equal in every slot, NaN in the same places: nothing else was written."""
    return all(np.array_equal(ours, theirs, equal_nan=True) for ours, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_the_kernel_equals_its_reference(interpreted: Run, dtype: str, page_size: int, rows: int) -> None:
    case = Case(lengths=(0, 15, 16, 17, 63, 64), rows=rows, head_dim=80, kv_heads=3, dtype=dtype)
    x, after = inputs(case, Layout(page_size=page_size))
    want = reference(x)
    assert equal((want[0], want[1]), [after["key_pages"], after["value_pages"]]), "the reference itself"
    assert equal(interpreted(append, x, dtype), want)


def test_shared_pages_stay_as_they_are(interpreted: Run) -> None:
    x, after = inputs(Case(lengths=(32, 40, 47)), Layout(shared=2))
    assert len(set(x["block_table"][:, :2].ravel())) == 2
    assert equal(interpreted(append, x, "float32"), [after["key_pages"], after["value_pages"]])


def test_rows_one_by_one_give_the_pages_of_all_at_once(interpreted: Run) -> None:
    x, after = inputs(Case(lengths=(14, 3), rows=5), Layout())
    for row in range(5):
        new = {name: x[name][:, row : row + 1] for name in ("key", "value")}
        pages = interpreted(append, x | new | {"lengths": x["lengths"] + row}, "float32")
        x |= dict(zip(("key_pages", "value_pages"), pages, strict=True))
    assert equal((x["key_pages"], x["value_pages"]), [after["key_pages"], after["value_pages"]])


def _faults() -> dict[str, Callable[[Arrays], Arrays]]:
    return {
        "a length one too small": lambda x: x | {"lengths": x["lengths"] - 1},
        "rows of the table swapped": lambda x: x | {"block_table": x["block_table"][::-1]},
        "keys as values": lambda x: x | {"value": x["key"]},
        "rows in another order": lambda x: x | {"key": x["key"][:, ::-1]},
    }


@pytest.mark.parametrize("fault", _faults())
def test_control_a_wrong_input_is_noticed(interpreted: Run, fault: str) -> None:
    x, after = inputs(Case(lengths=(14, 20)), Layout())
    want = [after["key_pages"], after["value_pages"]]
    assert equal(interpreted(append, x, "float32"), want)
    assert not equal(interpreted(append, _faults()[fault](x), "float32"), want), f"this test cannot see {fault}"


def test_a_row_behind_the_table_is_not_written(interpreted: Run) -> None:
    x, _ = inputs(Case(lengths=(14, 20)), Layout(spare=0))
    got = interpreted(append, x | {"lengths": np.array([32, 2**20], np.int32)}, "float32")
    assert equal(got, [x["key_pages"], x["value_pages"]])


def test_a_page_size_that_is_no_power_of_two_is_refused(interpreted: Run) -> None:
    with pytest.raises(ValueError, match="have 12 rows; the kernels need a power of two"):
        interpreted(call, "mtp_plugins.paged_kv_append.launch", "constants", 1, 12, 64)
