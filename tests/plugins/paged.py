"""Cases for the paged operators: sequences, layouts of their rows in pages, and the kernels on both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from mtp_plugins.paged_attention import launch as attention
from mtp_plugins.paged_attention.reference import paged_attention
from mtp_plugins.paged_kv_append.launch import launch as append_launch
from mtp_plugins.triton_kernels.launch import Launch
from tests.plugins.workers import Arrays, Change, Worker, run_kernel

INPUTS = ("query", "key_pages", "value_pages", "block_table", "lengths")
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Case:
    """Shapes of a call over sequences of the given committed lengths."""

    lengths: tuple[int, ...]
    rows: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"


@dataclass(frozen=True)
class Layout:
    """How sequences lie in pages.

    shared: pages at the start that all sequences have in common. spare: unused columns of the table, which hold
    numbers of no page. ordered: pages in order of position.
    """

    page_size: int = 16
    seed: int = 0
    shared: int = 0
    spare: int = 1
    ordered: bool = False


def sequences(case: Case, seed: int = 0, shared_rows: int = 0) -> Arrays:
    """Query, key and value rows of every sequence in float64, rounded to the dtype of the case.

    query float64[batch, rows, heads * head_dim]; key, value float64[batch, longest + rows, kv_heads, head_dim], with
    the first `shared_rows` rows alike in all sequences.
    """
    draw, batch = np.random.default_rng(seed).standard_normal, len(case.lengths)
    x = {"query": draw((batch, case.rows, case.heads * case.head_dim))}
    total = max(case.lengths) + case.rows
    x |= {name: draw((batch, total, case.kv_heads, case.head_dim)) for name in ("key", "value")}
    for name in ("key", "value"):
        x[name][:, :shared_rows] = x[name][:1, :shared_rows]
    return {name: array.astype(TYPES[case.dtype]).astype(np.float64) for name, array in x.items()}


def paged(case: Case, x: Arrays, layout: Layout = Layout()) -> Arrays:
    """The inputs of PagedAttention; every slot and column that the call may not read is NaN or no page."""
    size = layout.page_size
    columns = [-(-(length + case.rows) // size) for length in case.lengths]
    count = sum(columns) + 3
    order = np.arange(count) if layout.ordered else np.random.default_rng(layout.seed).permutation(count)
    pages = iter(order)
    table = np.full((len(columns), max(columns) + layout.spare), -7, np.int32)
    table[:, 1::2] = 2**30
    stores = {name: np.full((count, size, case.kv_heads, case.head_dim), np.nan) for name in ("key", "value")}
    for b, length in enumerate(case.lengths):
        for column in range(columns[b]):
            common = b > 0 and column < layout.shared
            table[b, column] = table[0, column] if common else next(pages)
            rows = slice(column * size, min((column + 1) * size, length + case.rows))
            for name, store in stores.items():
                store[table[b, column], : rows.stop - rows.start] = x[name][b, rows]
    lengths = np.array(case.lengths, np.int32)
    return {
        "query": x["query"],
        "key_pages": stores["key"],
        "value_pages": stores["value"],
        "block_table": table,
        "lengths": lengths,
    }


def part(case: Case, x: Arrays, rows: slice) -> tuple[Case, Arrays]:
    """The call with some of the rows: those before them are committed by then, those behind do not exist."""
    lengths = tuple(length + rows.start for length in case.lengths)
    return replace(case, rows=rows.stop - rows.start, lengths=lengths), x | {"query": x["query"][:, rows]}


def only(case: Case, x: Arrays, chosen: Sequence[int]) -> tuple[Case, Arrays]:
    """The call with some of the sequences, in that order."""
    fewer = replace(case, lengths=tuple(case.lengths[b] for b in chosen))
    return fewer, {name: array[list(chosen)] for name, array in x.items()}


def append(worker: Worker, x: Arrays, dtype: str, change: Change | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Pages of keys and values in float32 after PagedKvAppend; values of x are rounded to `dtype`."""
    _, page_size, kv_heads, head_dim = x["key_pages"].shape
    batch, rows, _ = x["key"].shape
    table = x["block_table"]
    sizes = {"batch": batch, "rows": rows, "max_pages": table.shape[1], "kv_heads": kv_heads, "head_dim": head_dim}
    launch = append_launch(**sizes, page_size=page_size)
    names = ("key", "value", "key_pages", "value_pages", "block_table", "lengths")
    outputs = {f"present_{name}": name for name in ("key_pages", "value_pages")}
    module = "mtp_plugins.paged_kv_append.kernel"
    got = worker.call(run_kernel, module, "paged_kv_append", launch, _rounded(x, names, dtype), outputs, change)
    return got["key_pages"].astype(np.float32), got["value_pages"].astype(np.float32)


def attend(
    worker: Worker,
    x: Arrays,
    dtype: str,
    *,
    scale: float | None = None,
    tile: int | None = None,
    change: Change | None = None,
) -> np.ndarray:
    """PagedAttention in float32; what the kernels leave for each other and the output begin as NaN.

    tile: keys in a tile, for a control.
    """
    _, page_size, kv_heads, head_dim = x["key_pages"].shape
    batch, rows, width = x["query"].shape
    sizes = attention.Sizes(
        batch=batch,
        rows=rows,
        heads=width // head_dim,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_pages=x["block_table"].shape[1],
        item_bytes=np.dtype(TYPES[dtype]).itemsize,
    )
    inputs = _rounded(x, INPUTS, dtype)
    partial = attention.launch_partial(sizes, scale=scale, widen=True)
    if tile is not None:
        partial = replace(partial, constexprs={**partial.constexprs, "key_block": tile})
    scratch = {name: np.full(shape, np.nan, np.float32) for name, shape in sizes.scratch().items()}
    output = np.full(x["query"].shape, np.nan, TYPES[dtype])
    got = worker.call(run_attention, (partial, attention.launch_combine(sizes)), inputs, scratch, output, change)
    assert isinstance(got, np.ndarray)
    return got.astype(np.float32)


def run_attention(
    launches: tuple[Launch, Launch], inputs: Arrays, scratch: Arrays, output: np.ndarray, change: Change | None
) -> np.ndarray:
    """Both kernels, of which the one that has the text of `change` is changed; in a worker."""
    module, (partial, combine) = "mtp_plugins.paged_attention.kernel", launches
    parts = run_kernel(module, "paged_attention_partial", partial, inputs, scratch, change)
    left = {name: parts[name] for name in (*scratch, "lengths")}
    return run_kernel(module, "paged_attention_combine", combine, left, {"output": output}, change)["output"]


def _rounded(x: Arrays, names: Sequence[str], dtype: str) -> Arrays:
    integers = ("block_table", "lengths")
    return {name: np.ascontiguousarray(x[name], np.int32 if name in integers else TYPES[dtype]) for name in names}


def reference(x: Arrays, scale: float | None = None) -> np.ndarray:
    """PagedAttention in float64."""
    return paged_attention(*(x[name] for name in INPUTS), scale)


# Of the largest value. Measured are 6e-7 from sums in float32, 5e-4 from weights and outputs in float16, and 1e-2 in
# bfloat16, which the interpreter cuts off instead of rounding; the smallest of the faults moves it by 0.3.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 3e-2}


def error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference, as a part of the largest value; infinite if anything is NaN."""
    found = float(np.abs(got - want).max() / np.abs(want).max())
    return found if np.isfinite(found) else np.inf
