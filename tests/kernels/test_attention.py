"""`CachedAttention` against softmax in float64, and rows that depend on nothing but their own position."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mtp_engines.backends.onnxruntime_cpu.buffers import Bound
from mtp_plugins.graph import DOMAIN, GraphBuilder

from .sessions import normal, open_lowered

Shape = tuple[int, int, int]
"""Query heads, heads of the cache, width."""
SHAPES: list[Shape] = [(8, 2, 16), (6, 2, 24), (7, 1, 16), (3, 3, 10), (5, 1, 40), (8, 2, 256)]


class Attention:
    """One node over caches that hold numbers wherever nothing was written yet."""

    def __init__(self, shape: Shape, capacity: int, *, batch: int = 1, threads: int = 1) -> None:
        heads, kv_heads, width = shape
        g = GraphBuilder("attention")
        counts = (("query", heads), ("key", kv_heads), ("value", kv_heads))
        rows = [g.input(name, "float32", ["batch", "rows", count * width]) for name, count in counts]
        cache = ["batch", kv_heads, "capacity", width]
        pasts = [g.input(f"past_key_values.0.{name}", "float32", cache) for name in ("key", "value")]
        length = g.input("past_length", "int64", ["batch"])
        outputs = ("output", "present_key", "present_value")
        attributes = {"num_heads": heads, "num_kv_heads": kv_heads}
        output, *presents = g.op_multi(
            "CachedAttention", *rows, *pasts, length, outputs=outputs, domain=DOMAIN, **attributes
        )
        g.output("output", output, "float32", ["batch", "rows", heads * width])
        for name, present in zip(("key", "value"), presents, strict=True):
            g.output(f"present.0.{name}", present, "float32", cache)
        self.session = open_lowered(g, threads)
        stored = int(self.session.get_inputs()[3].shape[3])
        self.shape, self.caches = shape, [normal(30 + i, batch, kv_heads, capacity, stored) for i in range(2)]

    def run(self, rows: Sequence[np.ndarray], length: Sequence[int]) -> np.ndarray:
        """The output; the caches get the new rows in place."""
        feeds = dict(zip(("query", "key", "value"), map(np.ascontiguousarray, rows), strict=True))
        output = np.zeros_like(feeds["query"])
        caches = dict(zip(("key", "value"), self.caches, strict=True))
        inputs = feeds | {f"past_key_values.0.{name}": array for name, array in caches.items()}
        outputs = {"output": output} | {f"present.0.{name}": array for name, array in caches.items()}
        Bound(self.session, inputs | {"past_length": np.array(length, np.int64)}, outputs).run()
        return output


def rows_of(shape: Shape, count: int, batch: int = 1) -> list[np.ndarray]:
    heads, kv_heads, width = shape
    return [normal(40 + i, batch, count, n * width) for i, n in enumerate((heads, kv_heads, kv_heads))]


def expected(shape: Shape, caches: Sequence[np.ndarray], query: np.ndarray, length: int) -> np.ndarray:
    """float64[rows, heads * width] over caches that hold the new rows."""
    heads, kv_heads, width = shape
    keys, values = (cache[..., :width].astype(np.float64).repeat(heads // kv_heads, axis=0) for cache in caches)
    rows = []
    for row, line in enumerate(query.astype(np.float64).reshape(-1, heads, width)):
        seen = length + row + 1
        scores = np.einsum("hd,hnd->hn", line, keys[:, :seen]) / np.sqrt(width)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        rows.append(np.einsum("hn,hnd->hd", weights, values[:, :seen]).reshape(-1))
    return np.array(rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 129, 300])
@pytest.mark.parametrize("count", [1, 3, 70])
def test_outputs_are_softmax_over_all_rows_up_to_the_own(shape: Shape, length: int, count: int) -> None:
    attention, rows = Attention(shape, 512, batch=2), rows_of(shape, count, 2)
    lengths = [length, length // 2]
    output = attention.run(rows, lengths)
    for sequence, before in enumerate(lengths):
        caches = [cache[sequence] for cache in attention.caches]
        new = rows[1][sequence].reshape(count, shape[1], shape[2]).swapaxes(0, 1)
        np.testing.assert_array_equal(caches[0][:, before : before + count, : shape[2]], new)
        right = expected(shape, caches, rows[0][sequence], before)
        np.testing.assert_allclose(output[sequence], right, atol=1e-5, rtol=1e-4)
        wrong = expected(shape, caches, rows[0][sequence], before + 1)
        assert np.abs(wrong - output[sequence]).max() > 1e-3, "control: a row more is seen"


@pytest.mark.parametrize("shape", SHAPES[:5])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_how_many_a_call_has(shape: Shape, threads: int) -> None:
    rows = rows_of(shape, 300)
    whole = Attention(shape, 512, threads=threads)
    together = whole.run(rows, [100])
    parts = Attention(shape, 512)
    first = 0
    for count in (1, 2, 3, 1, 4, 5, 8, 1, 16, 17, 33, 65, 100, 44):
        output = parts.run([part[:, first : first + count] for part in rows], [100 + first])
        np.testing.assert_array_equal(output, together[:, first : first + count])
        first += count
    assert first == 300
    other = Attention(shape, 512)
    other.caches[0][:, :, 5] *= np.float32(1.00001)
    assert (other.run(rows, [100]) != together).any(), "control: a hundred-thousandth in one cached row is seen"


def test_sequences_of_a_batch_do_not_depend_on_each_other() -> None:
    shape, lengths = SHAPES[0], [7, 250, 0, 128]
    rows = rows_of(shape, 3, len(lengths))
    together = Attention(shape, 300, batch=4)
    before = [cache.copy() for cache in together.caches]
    output = together.run(rows, lengths)
    for sequence, length in enumerate(lengths):
        alone = Attention(shape, 300)
        alone.caches = [cache[sequence : sequence + 1].copy() for cache in before]
        found = alone.run([part[sequence : sequence + 1] for part in rows], [length])
        np.testing.assert_array_equal(found[0], output[sequence])


def test_what_lies_behind_a_row_is_never_read() -> None:
    shape, rows = SHAPES[0], rows_of(SHAPES[0], 2)
    clean, dirty = Attention(shape, 300), Attention(shape, 300)
    for cache in dirty.caches:
        cache[:, :, 130:] = np.nan
    np.testing.assert_array_equal(dirty.run(rows, [128]), clean.run(rows, [128]))
    dirty.caches[0][:, :, 3] = np.nan
    assert np.isnan(dirty.run(rows, [128])).any(), "control: what lies before it is"


@pytest.mark.parametrize("count", [2, 5, 70])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_later_row_does_not_reach_an_earlier_one(count: int, bad: float) -> None:
    shape, rows = SHAPES[0], rows_of(SHAPES[0], count)
    clean = Attention(shape, 300).run(rows, [120])
    for part in rows[1:]:
        part[:, -1] = bad
    found = Attention(shape, 300).run(rows, [120])
    np.testing.assert_array_equal(found[:, :-1], clean[:, :-1])
    assert not np.isfinite(found[:, -1]).any(), "control: its own is not finite"


def test_no_rows_leave_caches_as_they_are() -> None:
    attention, rows = Attention(SHAPES[0], 64), rows_of(SHAPES[0], 0)
    feeds = dict(zip(("query", "key", "value"), rows, strict=True))
    before = zip(("key", "value"), attention.caches, strict=True)
    feeds |= {f"past_key_values.0.{name}": cache for name, cache in before}
    output, *caches = attention.session.run(None, feeds | {"past_length": np.array([3])})
    assert output.shape == (1, 0, 128)
    for found, cache in zip(caches, attention.caches, strict=True):
        np.testing.assert_array_equal(found, cache)


@pytest.mark.parametrize("name", ["key", "value", "past_key_values.0.key", "past_key_values.0.value", "past_length"])
def test_tensors_that_do_not_fit_are_refused(name: str) -> None:
    attention, rows = Attention(SHAPES[0], 64, batch=2), rows_of(SHAPES[0], 3, 2)
    feeds = dict(zip(("query", "key", "value"), rows, strict=True))
    before = zip(("key", "value"), attention.caches, strict=True)
    feeds |= {f"past_key_values.0.{kind}": cache for kind, cache in before} | {"past_length": np.array([3, 4])}
    attention.session.run(None, feeds)
    with pytest.raises(Exception, match="do not fit together"):
        attention.session.run(None, feeds | {name: feeds[name][:1]})
    for length in (-1, 62, 2**63 - 1):
        with pytest.raises(Exception, match="room for"):
            attention.session.run(None, feeds | {"past_length": np.array([3, length])})


def test_caches_that_are_not_shared_are_copied_and_full_ones_refused() -> None:
    shape, rows = SHAPES[0], rows_of(SHAPES[0], 2)
    attention = Attention(shape, 64)
    before = [cache.copy() for cache in attention.caches]
    feeds = dict(zip(("query", "key", "value"), rows, strict=True))
    feeds |= {f"past_key_values.0.{name}": cache for name, cache in zip(("key", "value"), before, strict=True)}
    output, key, _ = attention.session.run(None, feeds | {"past_length": np.array([62])})
    np.testing.assert_array_equal(output, attention.run(rows, [62]))
    np.testing.assert_array_equal(key, attention.caches[0])
    with pytest.raises(Exception, match="more rows than the cache has room for"):
        attention.session.run(None, feeds | {"past_length": np.array([63])})


def test_a_latent_cache_is_key_and_value() -> None:
    heads, width = 4, 24
    g = GraphBuilder("latent")
    query = g.input("query", "float32", ["batch", "rows", heads * width])
    new = g.input("rows", "float32", ["batch", "rows", width])
    past = g.input("past_key_values.0.latent", "float32", ["batch", 1, "capacity", width])
    length = g.input("past_length", "int64", ["batch"])
    output, present = g.op_multi(
        "LatentAttention", query, new, past, length, outputs=("output", "present"), domain=DOMAIN, num_heads=heads
    )
    g.output("output", output, "float32", ["batch", "rows", heads * width])
    g.output("present.0.latent", present, "float32", ["batch", 1, "capacity", width])
    session = open_lowered(g)
    cache, x = normal(50, 1, 1, 200, width), [normal(51, 1, 3, heads * width), normal(52, 1, 3, width)]
    feeds = {"query": x[0], "rows": x[1], "past_key_values.0.latent": cache, "past_length": np.array([140])}
    found, after, again = session.run(None, feeds)
    np.testing.assert_array_equal(after, again)
    np.testing.assert_array_equal(after[0, 0, 140:143], x[1][0])
    right = expected((heads, 1, width), [after[0], after[0]], x[0][0], 140)
    np.testing.assert_allclose(found[0], right, atol=1e-5, rtol=1e-4)
