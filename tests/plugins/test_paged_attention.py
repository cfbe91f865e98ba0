"""The PagedAttention kernels against the float64 reference, and their bits over rows, batches and pages."""

from __future__ import annotations

import numpy as np
import pytest

from mtp_plugins.paged_attention.launch import Sizes
from tests.plugins import test_operators as bodies
from tests.plugins.paged import TOLERANCE, Case, Layout, attend, error, only, paged, part, reference, sequences
from tests.plugins.workers import Worker

DTYPES = sorted(TOLERANCE)
# Rows on both sides of a border of splits (256) and of pages.
BORDER = Case(lengths=(254, 3), rows=3, heads=3, kv_heads=1, head_dim=80)


def compare(interpreter: Worker, case: Case, layout: Layout, scale: float | None = None) -> None:
    x = paged(case, sequences(case, shared_rows=layout.shared * layout.page_size), layout)
    assert error(attend(interpreter, x, case.dtype, scale=scale), reference(x, scale)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 1), ("float32", 4), ("float16", 4), ("bfloat16", 4)])
def test_short_sequences_equal_the_reference_at_page_borders(interpreter: Worker, dtype: str, rows: int) -> None:
    compare(interpreter, Case(lengths=(0, 1, 15, 16), rows=rows, heads=2, kv_heads=1, dtype=dtype), Layout())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sequences_of_several_splits_equal_the_reference(interpreter: Worker, dtype: str) -> None:
    compare(interpreter, Case(lengths=(255, 256, 700), rows=2, heads=2, kv_heads=1, dtype=dtype), Layout(page_size=32))


def test_splits_beyond_one_block_of_the_combination_equal_the_reference(interpreter: Worker) -> None:
    case = Case(lengths=(17 * 256 - 1,), rows=2, heads=2, kv_heads=1, head_dim=16)
    compare(interpreter, case, Layout(page_size=256))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (7, 1), (40, 1)])
def test_ratios_of_heads_equal_the_reference(interpreter: Worker, heads: int, kv_heads: int) -> None:
    compare(interpreter, Case(lengths=(37,), rows=2, heads=heads, kv_heads=kv_heads), Layout())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_widths_of_heads_equal_the_reference(interpreter: Worker, head_dim: int, dtype: str) -> None:
    compare(interpreter, Case(lengths=(37,), rows=2, head_dim=head_dim, dtype=dtype), Layout())


@pytest.mark.parametrize("page_size", [1, 4, 512])
def test_sizes_of_pages_equal_the_reference(interpreter: Worker, page_size: int) -> None:
    compare(interpreter, Case(lengths=(63, 270), rows=2, kv_heads=1), Layout(page_size=page_size))


def test_shared_pages_equal_the_reference(interpreter: Worker) -> None:
    compare(interpreter, Case(lengths=(40, 48), rows=3), Layout(shared=2))


def test_the_scale_is_taken(interpreter: Worker) -> None:
    case = Case(lengths=(37, 20))
    compare(interpreter, case, Layout(), scale=0.31)
    x = paged(case, sequences(case))
    assert error(reference(x, 0.31), reference(x)) > TOLERANCE["float32"], "control: the scale matters"


@pytest.mark.parametrize(("dtype", "width"), [("float32", 1), ("float16", 5), ("bfloat16", 3)])
def test_rows_do_not_depend_on_their_number(interpreter: Worker, dtype: str, width: int) -> None:
    case = Case(lengths=(252,), rows=10, heads=3, kv_heads=1, head_dim=80, dtype=dtype)
    x = sequences(case)
    inputs = paged(case, x)
    whole = attend(interpreter, inputs, dtype)
    assert error(whole, reference(inputs)) < TOLERANCE[dtype]
    for start in range(0, case.rows, width):
        rows = slice(start, min(start + width, case.rows))
        smaller, y = part(case, x, rows)
        assert same_bits(attend(interpreter, paged(smaller, y), dtype), whole[:, rows]), f"rows {rows}"


LAYOUTS = [Layout(ordered=True), Layout(seed=1), Layout(page_size=1), Layout(page_size=128), Layout(spare=70)]


def test_rows_do_not_depend_on_the_layout_of_pages(interpreter: Worker) -> None:
    x = sequences(BORDER)
    whole = attend(interpreter, paged(BORDER, x), "float32")
    for layout in LAYOUTS:
        assert same_bits(attend(interpreter, paged(BORDER, x, layout), "float32"), whole), str(layout)


def test_rows_do_not_depend_on_shared_pages(interpreter: Worker) -> None:
    case = Case(lengths=(270, 300), rows=2, kv_heads=1)
    x = sequences(case, shared_rows=256)
    apart, shared = (attend(interpreter, paged(case, x, Layout(shared=n)), "float32") for n in (0, 16))
    assert same_bits(apart, shared)


def test_rows_do_not_depend_on_the_batch(interpreter: Worker) -> None:
    x = sequences(BORDER)
    whole = attend(interpreter, paged(BORDER, x), "float32")
    for chosen in ([1], [1, 0]):
        fewer, y = only(BORDER, x, chosen)
        assert same_bits(attend(interpreter, paged(fewer, y), "float32"), whole[chosen])


def test_control_another_order_of_sums_changes_bits(interpreter: Worker) -> None:
    x = paged(BORDER, sequences(BORDER))
    assert not same_bits(attend(interpreter, x, "float32", tile=16), attend(interpreter, x, "float32"))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.isfinite(a).all()) and a.tobytes() == b.tobytes()


def test_a_chunk_has_more_rows_than_a_verify(interpreter: Worker) -> None:
    compare(interpreter, Case(lengths=(250,), rows=18, heads=2, kv_heads=1, head_dim=16), Layout())


def test_padding_without_a_page_changes_no_row_before_it(interpreter: Worker) -> None:
    """A sequence with 3 of 8 rows, and no page for positions that only padding has."""
    case = Case(lengths=(10, 20), rows=8, heads=2, kv_heads=1, head_dim=16)
    x = paged(case, sequences(case), Layout(page_size=4))
    whole = attend(interpreter, x, "float32")
    table = x["block_table"].copy()
    table[0, 4:] = -1  # 13 rows are in columns 0 to 3.
    padded = x | {"block_table": table}
    got = attend(interpreter, padded, "float32")
    want = reference(padded)
    assert error(got, want) < TOLERANCE["float32"], "a page of zeros"
    body = bodies.run(bodies.session("PagedAttention", padded, {"scale": 0.25}, lowered=False), padded)[0]
    assert error(body, want) < TOLERANCE["float32"]
    assert same_bits(got[0, :3], whole[0, :3])
    assert same_bits(got[1], whole[1])
    assert not same_bits(got[0, 6:], whole[0, 6:]), "control: the pages were taken away"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"rows": 1025}, "has 1025 query rows; the kernels take 1 to 1024"),
        ({"page_size": 24}, "have 24 rows; the kernels need a power of two"),
        ({"head_dim": 512}, "head_dim is 512; the kernels take 16 to 256"),
        ({"heads": 3}, "3 query heads are no multiple of 2 key heads"),
    ],
)
def test_sizes_that_the_kernels_do_not_take_are_refused(sizes: dict[str, int], text: str) -> None:
    taken = {"batch": 1, "rows": 1, "heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "max_pages": 4}
    Sizes(**taken)
    with pytest.raises(ValueError, match=text):
        Sizes(**(taken | sizes))
