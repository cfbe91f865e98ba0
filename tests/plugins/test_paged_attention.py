"""The PagedAttention kernels against the float64 reference, and their bits over rows, batches and pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.plugins.interpreted import Run, attend, call, interpreted
from tests.plugins.paged import TOLERANCE, Case, Layout, error, only, paged, part, reference, sequences

__all__ = ["interpreted"]

DTYPES = sorted(TOLERANCE)
# Rows on both sides of a border of splits (256) and of pages.
BORDER = Case(lengths=(254, 3), rows=3, heads=3, kv_heads=1, head_dim=80)


def compare(interpreted: Run, case: Case, layout: Layout, scale: float | None = None) -> None:
    x = paged(case, sequences(case, shared_rows=layout.shared * layout.page_size), layout)
    assert error(interpreted(attend, x, case.dtype, scale=scale), reference(x, scale)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4])
def test_short_sequences_equal_the_reference_at_page_borders(interpreted: Run, dtype: str, rows: int) -> None:
    compare(interpreted, Case(lengths=(0, 1, 15, 16), rows=rows, heads=2, kv_heads=1, dtype=dtype), Layout())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_several_splits_equal_the_reference(interpreted: Run, dtype: str) -> None:
    compare(interpreted, Case(lengths=(255, 256, 700), rows=2, heads=2, kv_heads=1, dtype=dtype), Layout(page_size=32))


def test_splits_beyond_one_block_of_the_combination_equal_the_reference(interpreted: Run) -> None:
    case = Case(lengths=(17 * 256 - 1,), rows=2, heads=2, kv_heads=1, head_dim=16)
    compare(interpreted, case, Layout(page_size=256))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (7, 1), (40, 1)])
def test_ratios_of_heads_equal_the_reference(interpreted: Run, heads: int, kv_heads: int) -> None:
    compare(interpreted, Case(lengths=(37,), rows=2, heads=heads, kv_heads=kv_heads), Layout())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_widths_of_heads_equal_the_reference(interpreted: Run, head_dim: int, dtype: str) -> None:
    compare(interpreted, Case(lengths=(37,), rows=2, head_dim=head_dim, dtype=dtype), Layout())


@pytest.mark.parametrize("page_size", [1, 4, 512])
def test_sizes_of_pages_equal_the_reference(interpreted: Run, page_size: int) -> None:
    compare(interpreted, Case(lengths=(63, 270), rows=2, kv_heads=1), Layout(page_size=page_size))


def test_shared_pages_equal_the_reference(interpreted: Run) -> None:
    compare(interpreted, Case(lengths=(40, 48), rows=3), Layout(shared=2))


def test_the_scale_is_taken(interpreted: Run) -> None:
    case = Case(lengths=(37, 20))
    compare(interpreted, case, Layout(), scale=0.31)
    x = paged(case, sequences(case))
    assert error(reference(x, 0.31), reference(x)) > TOLERANCE["float32"], "control: the scale matters"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5])
def test_rows_do_not_depend_on_their_number(interpreted: Run, dtype: str, width: int) -> None:
    case = Case(lengths=(252,), rows=16, heads=3, kv_heads=1, head_dim=80, dtype=dtype)
    x = sequences(case)
    inputs = paged(case, x)
    whole = interpreted(attend, inputs, dtype)
    assert error(whole, reference(inputs)) < TOLERANCE[dtype]
    for start in range(0, case.rows, width):
        rows = slice(start, min(start + width, case.rows))
        smaller, y = part(case, x, rows)
        assert same_bits(interpreted(attend, paged(smaller, y), dtype), whole[:, rows]), f"rows {rows}"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(ordered=True),
        Layout(seed=1),
        Layout(page_size=1),
        Layout(page_size=128),
        Layout(spare=70),
    ],
    ids=str,
)
def test_rows_do_not_depend_on_the_layout_of_pages(interpreted: Run, layout: Layout) -> None:
    x = sequences(BORDER)
    whole = interpreted(attend, paged(BORDER, x), "float32")
    assert same_bits(interpreted(attend, paged(BORDER, x, layout), "float32"), whole)


def test_rows_do_not_depend_on_shared_pages(interpreted: Run) -> None:
    case = Case(lengths=(270, 300), rows=2, kv_heads=1)
    x = sequences(case, shared_rows=256)
    apart, shared = (interpreted(attend, paged(case, x, Layout(shared=n)), "float32") for n in (0, 16))
    assert same_bits(apart, shared)


@pytest.mark.parametrize("chosen", [[1], [1, 0]], ids=str)
def test_rows_do_not_depend_on_the_batch(interpreted: Run, chosen: list[int]) -> None:
    x = sequences(BORDER)
    whole = interpreted(attend, paged(BORDER, x), "float32")
    fewer, y = only(BORDER, x, chosen)
    assert same_bits(interpreted(attend, paged(fewer, y), "float32"), whole[chosen])


def test_control_another_order_of_sums_changes_bits(interpreted: Run) -> None:
    x = paged(BORDER, sequences(BORDER))
    assert not same_bits(interpreted(attend, x, "float32", tile=16), interpreted(attend, x, "float32"))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.isfinite(a).all()) and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(
    ("query", "pages", "text"),
    [
        ((1, 17, 64), (9, 16, 1, 64), "has 17 query rows; the kernels take 1 to 16"),
        ((1, 1, 64), (9, 24, 1, 64), "have 24 rows; the kernels need a power of two"),
        ((1, 1, 512), (9, 16, 1, 512), "head_dim is 512; the kernels take 16 to 256"),
        ((1, 1, 192), (9, 16, 2, 64), "row of 192 is no multiple of 2 key heads of 64"),
    ],
)
def test_shapes_that_the_kernels_do_not_take_are_refused(interpreted: Run, query: Any, pages: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        interpreted(call, "mtp_plugins.paged_attention.launch", "plan", query, pages, 4, 2)
