"""The PagedKvAppend kernel against its reference, with controls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtp_plugins.paged_kv_append.launch import launch
from mtp_plugins.paged_kv_append.reference import paged_kv_append
from tests.plugins import test_operators as bodies
from tests.plugins.paged import Case, Layout, append, paged, sequences
from tests.plugins.workers import Arrays, Change, Worker

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


@pytest.mark.parametrize(
    ("rows", "page_size", "dtype"),
    [(1, 16, "float32"), (16, 1, "float32"), (4, 64, "float16"), (4, 16, "bfloat16"), (40, 16, "float32")],
)
def test_the_kernel_equals_its_reference(interpreter: Worker, dtype: str, page_size: int, rows: int) -> None:
    case = Case(lengths=(0, 15, 16, 17, 63, 64), rows=rows, head_dim=80, kv_heads=3, dtype=dtype)
    x, after = inputs(case, Layout(page_size=page_size))
    want = reference(x)
    assert equal((want[0], want[1]), [after["key_pages"], after["value_pages"]]), "the reference itself"
    assert equal(append(interpreter, x, dtype), want)


def test_shared_pages_stay_as_they_are(interpreter: Worker) -> None:
    x, after = inputs(Case(lengths=(32, 40, 47)), Layout(shared=2))
    assert len(set(x["block_table"][:, :2].ravel())) == 2
    assert equal(append(interpreter, x, "float32"), [after["key_pages"], after["value_pages"]])


def test_rows_one_by_one_give_the_pages_of_all_at_once(interpreter: Worker) -> None:
    x, after = inputs(Case(lengths=(14, 3), rows=5), Layout())
    for row in range(5):
        new = {name: x[name][:, row : row + 1] for name in ("key", "value")}
        pages = append(interpreter, x | new | {"lengths": x["lengths"] + row}, "float32")
        x |= dict(zip(("key_pages", "value_pages"), pages, strict=True))
    assert equal((x["key_pages"], x["value_pages"]), [after["key_pages"], after["value_pages"]])


FAULTS: dict[str, Callable[[Arrays], Arrays]] = {
    "a length one too small": lambda x: x | {"lengths": x["lengths"] - 1},
    "rows of the table swapped": lambda x: x | {"block_table": x["block_table"][::-1]},
    "keys as values": lambda x: x | {"value": x["key"]},
    "rows in another order": lambda x: x | {"key": x["key"][:, ::-1]},
}


def test_control_a_wrong_input_is_noticed(interpreter: Worker) -> None:
    x, after = inputs(Case(lengths=(14, 20)), Layout())
    want = [after["key_pages"], after["value_pages"]]
    assert equal(append(interpreter, x, "float32"), want)
    for fault, change in FAULTS.items():
        assert not equal(append(interpreter, change(x), "float32"), want), f"this test cannot see {fault}"


def padded() -> tuple[Arrays, list[np.ndarray]]:
    """A call of 6 rows, of which 2, 4 and 0 have a page, and the pages after it.

    The first sequence has no page for its padding; that of the others lies behind the table.
    """
    draw, wide = np.random.default_rng(0).standard_normal, (3, 6, 16)
    x = {name: draw(wide).astype(np.float32) for name in ("key", "value")}
    x |= {f"{name}_pages": draw((5, 4, 1, 16)).astype(np.float32) for name in ("key", "value")}
    x["block_table"] = np.array([[3, -1, -2], [0, 4, 2], [1, -1, -1]], np.int32)
    x["lengths"] = np.array([2, 8, 100], np.int32)
    want = [x["key_pages"], x["value_pages"]]
    for b, rows in enumerate((2, 4)):
        one = slice(b, b + 1)
        new, where = (x["key"][one, :rows], x["value"][one, :rows]), (x["block_table"][one], x["lengths"][one])
        want = [paged_kv_append(rows, pages, *where) for rows, pages in zip(new, want, strict=True)]
    return x, want


def test_a_row_without_a_page_is_not_written(interpreter: Worker) -> None:
    x, want = padded()
    assert equal(append(interpreter, x, "float32"), want)
    renamed = {f"past_{name}" if "pages" in name else name: value for name, value in x.items()}
    body = bodies.run(bodies.session("PagedKvAppend", renamed, {}, lowered=False), renamed)
    assert equal((body[0], body[1]), want)


PADDING_FAULTS = {
    "page 0 for no page": (
        "mask = (element < width) & (page >= 0)",
        "page, mask = tl.maximum(page, 0), element < width",
    ),
    "the table of another sequence": ("(column < max_pages)", "(column < 4)"),
}


@pytest.mark.parametrize("fault", PADDING_FAULTS)
def test_control_a_padding_row_that_is_written_is_noticed(interpreter: Worker, tmp_path: Path, fault: str) -> None:
    x, want = padded()
    wrong = append(interpreter, x, "float32", Change(tmp_path, *PADDING_FAULTS[fault]))
    assert not equal(wrong, want), f"this test cannot see {fault}"


def test_a_page_size_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="have 12 rows; the kernels need a power of two"):
        launch(batch=1, rows=1, max_pages=1, page_size=12, kv_heads=1, head_dim=64)
