"""Decision 0021: heads that share a cache are rows of one head, and no row depends on how many rows a call has."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.backends.onnxruntime_cpu.buffers import Bound
from mtp_engines.lowering import cached_attention
from mtp_engines.lowering.attention_trial import first_difference
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_plugins.graph import DOMAIN, GraphBuilder

Shape = tuple[int, int, int]
"""Query heads, heads of the cache, width."""
MOST_ROWS = 17
ROWS = (1, 2, 3, 4, 5, 8, 16)
GROUPS: list[Shape] = [(8, 2, 16), (6, 2, 16), (4, 2, 24), (7, 1, 16), (12, 1, 16), (3, 3, 16)]


class Attention:
    """One CachedAttention node over caches that hold random rows wherever nothing was written yet."""

    def __init__(
        self,
        shape: Shape,
        capacity: int,
        *,
        threads: int = 1,
        folded_for: int = 1,
        batch: int = 1,
        most: int = MOST_ROWS,
    ) -> None:
        heads, kv_heads, width = shape
        g = GraphBuilder("attention")
        rows = [
            g.input(name, "float32", ["batch", "rows", count * width])
            for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
        ]
        pasts = [
            g.input(f"past_key_values.0.{name}", "float32", ["batch", kv_heads, "capacity", width])
            for name in ("key", "value")
        ]
        length = g.input("past_length", "int64", ["batch"])
        output, *presents = g.op_multi(
            "CachedAttention",
            *(*rows, *pasts, length),
            outputs=("output", "present_key", "present_value"),
            domain=DOMAIN,
            num_heads=heads,
            num_kv_heads=kv_heads,
        )
        g.output("output", output, "float32", ["batch", "rows", heads * width])
        for name, present in zip(("key", "value"), presents, strict=True):
            g.output(f"present.0.{name}", present, "float32", ["batch", kv_heads, "capacity", width])
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        payload = ir.to_proto(lower(g.model(domains=[DOMAIN]), threads=folded_for)).SerializeToString()
        self._session = ort.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
        draw = np.random.default_rng(0).standard_normal
        self.capacity = capacity
        self.inputs = {
            name: draw((batch, most, count * width)).astype(np.float32)
            for name, count in (("query", heads), ("key", kv_heads), ("value", kv_heads))
        }
        stored = cached_attention.stored_width(width)
        self.caches = {name: np.zeros((batch, kv_heads, capacity, stored), np.float32) for name in ("key", "value")}
        for cache in self.caches.values():
            cache[..., :width] = draw((batch, kv_heads, capacity, width))

    def run(
        self, past: int | list[int], rows: int, start: int = 0, *, caches: dict[str, np.ndarray] | None = None
    ) -> np.ndarray:
        """float32[batch, rows, heads * width] of the input rows from `start` on behind `past` cached rows.

        The caches are copied, or those given are written in place.
        """
        caches = caches or {name: cache.copy() for name, cache in self.caches.items()}
        batch = len(caches["key"])
        inputs = {
            name: np.ascontiguousarray(array[:batch, start : start + rows]) for name, array in self.inputs.items()
        }
        output = np.zeros_like(inputs["query"])
        bound_in = inputs | {f"past_key_values.0.{name}": cache for name, cache in caches.items()}
        bound_in["past_length"] = np.array([past] if isinstance(past, int) else past)
        bound_out = {"output": output} | {f"present.0.{name}": cache for name, cache in caches.items()}
        Bound(self._session, bound_in, bound_out).run()
        return output

    def differing(
        self, pasts: Iterable[int], widths: Iterable[int] = ROWS, most: int = MOST_ROWS
    ) -> list[tuple[int, int]]:
        """Cached lengths and numbers of rows whose results are not those of a call with `most` rows."""
        caches = {name: cache.copy() for name, cache in self.caches.items()}
        found = []
        for past in pasts:
            # What lies behind the past is written over by every call, so the caches need no second copy.
            whole = self.run(past, most, caches=caches)
            found += [
                (past, rows)
                for rows in widths
                if not np.array_equal(self.run(past, rows, caches=caches), whole[:, :rows])
            ]
        return found


@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_rows_do_not_depend_on_their_number_at_any_length(shape: Shape) -> None:
    """The longest call is not folded, nor the last ones, which have no room for it in the cache."""
    attention = Attention(shape, 700 + MOST_ROWS + 1)
    assert attention.differing(range(0, 701, 1 if shape in GROUPS[:2] else 3)) == []


@pytest.mark.parametrize("width", [64, 128, 256])
def test_rows_do_not_depend_on_their_number_at_long_contexts(width: int) -> None:
    if first_difference(width) is not None:
        pytest.skip(f"this processor's kernel splits rows of {width}, and engines say so")
    attention = Attention((8, 2, width), 8448)
    pasts = np.random.default_rng(width).integers(700, 8400, 6)
    assert attention.differing([*map(int, pasts), 8191, 8192], (1, 2, 3, 4, 5, 8, 16)) == []


def test_neither_threads_nor_the_heads_that_are_folded_for_them_change_a_row() -> None:
    attentions = [Attention((8, 2, 64), 400, threads=t, folded_for=f) for t, f in ((1, 1), (2, 2), (2, 4), (1, 8))]
    for past in range(0, 380, 7):
        first, *others = ([a.run(past, rows).tobytes() for rows in (1, 2, 5, 16)] for a in attentions)
        assert all(other == first for other in others), f"at {past} cached rows"


def test_a_sequence_of_a_batch_is_what_it_would_be_alone() -> None:
    batch = Attention((8, 2, 64), 600, batch=3)
    for pasts in ([0, 411, 77], [130, 130, 130], [582, 1, 64]):
        for rows in (1, 2, 4, 17):
            together = batch.run(pasts, rows)
            for sequence, past in enumerate(pasts):
                alone = Attention((8, 2, 64), 600)
                alone.inputs = {name: array[sequence : sequence + 1] for name, array in batch.inputs.items()}
                caches = {name: cache[sequence : sequence + 1].copy() for name, cache in batch.caches.items()}
                assert np.array_equal(alone.run(past, rows, caches=caches)[0], together[sequence])


@pytest.mark.parametrize("width", [16, 64])
def test_a_row_behind_whole_blocks_of_a_prompt_is_not_computed_alone(width: int) -> None:
    """The kernel takes query rows in blocks, and a last block of one row would be a lone row again."""
    attention = Attention((8, 2, width), 300, most=256)
    assert attention.differing([10], range(18, 256), most=256) == []


def test_only_the_new_rows_and_some_behind_them_are_written() -> None:
    attention = Attention((8, 2, 16), 300)
    caches = {name: cache.copy() for name, cache in attention.caches.items()}
    attention.run(100, 3, caches=caches)
    most = 100 + cached_attention.MOST_FOLDED_ROWS
    for name, cache in caches.items():
        new = attention.inputs[name][0, :3].reshape(3, 2, 16).transpose(1, 0, 2)
        np.testing.assert_array_equal(cache[0, :, 100:103], new)
        for kept in (slice(0, 100), slice(most, None)):
            np.testing.assert_array_equal(cache[:, :, kept], attention.caches[name][:, :, kept])


def test_what_an_earlier_call_left_behind_the_rows_is_never_read() -> None:
    attention = Attention((8, 2, 16), 300)
    for rows in (1, 3, 16, 17):
        clean = attention.run(100, rows)
        caches = {name: cache.copy() for name, cache in attention.caches.items()}
        for cache in caches.values():
            cache[:, :, 100:] = np.nan
        np.testing.assert_array_equal(attention.run(100, rows, caches=caches), clean)


def test_few_rows_are_folded_and_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told apart by a fault in one of the two ways."""
    right = Attention((8, 2, 16), 300)
    whole = right.run(100, MOST_ROWS)
    full = {name: cache[:, :, : 100 + MOST_ROWS].copy() for name, cache in right.caches.items()}
    monkeypatch.setattr(cached_attention, "_bias", lambda g, *_: g.constant(np.zeros((1, 1, 1, 1)), "float32"))
    with pytest.raises(Exception, match="attention_bias"):
        Attention((8, 2, 16), 300).run(100, 16)
    np.testing.assert_array_equal(Attention((8, 2, 16), 300).run(100, MOST_ROWS), whole)
    np.testing.assert_array_equal(Attention((8, 2, 16), 300).run(100, 16, caches=full), whole[:, :16])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "threads", "fold"),
    [
        (8, 2, 1, 4),
        (8, 2, 2, 4),
        (8, 2, 4, 2),
        (8, 2, 8, 1),
        (16, 1, 2, 8),
        (6, 2, 1, 3),
        (14, 2, 1, 7),
        (22, 2, 1, 1),
        (4, 4, 1, 1),
    ],
)
def test_every_thread_keeps_a_head(heads: int, kv_heads: int, threads: int, fold: int) -> None:
    assert cached_attention.folded_heads(heads, kv_heads, threads) == fold


def test_control_a_lone_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What decision 0004 found: one row in each head, without a twin."""
    monkeypatch.setattr(cached_attention, "_even", lambda g, rows: rows)
    found = Attention((8, 2, 16), 200, folded_for=8).differing(range(0, 180, 10))
    assert {rows for _, rows in found} == {1}
    assert len(found) > 10


def test_control_a_lone_row_behind_whole_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_attention, "_even", lambda g, rows: rows)
    found = Attention((8, 2, 16), 300, most=256).differing([10], range(18, 256), most=256)
    if not found:
        pytest.skip("this processor's blocks leave no row alone")
    assert all(rows % 2 for _, rows in found)


@pytest.mark.parametrize("fault", ["later rows are seen", "a row too few is seen"])
def test_control_a_wrong_bias_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cached_attention._bias
    shift = 1 if fault == "later rows are seen" else -1

    def shifted(g: GraphBuilder, past_length: ir.Value, *rest: ir.Value | int) -> ir.Value:
        return right(g, g.op("Add", past_length, g.constant([shift])), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cached_attention, "_bias", shifted)
    found = Attention((8, 2, 16), 100).differing(range(0, 60, 10))
    assert {rows for _, rows in found} == set(ROWS)
