"""Decision 0006: attention rounds alike for every number of rows at every cached length, if rows are stored so wide."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.backends.onnxruntime_cpu.buffers import Bound
from mtp_engines.lowering import cached_attention
from mtp_engines.lowering.attention_trial import first_difference
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_plugins.graph import DOMAIN, GraphBuilder

HEADS, CAPACITY, MOST_ROWS = 4, 96, 7


class Attention:
    """One LatentAttention node of a width, over a cache that is kept between calls."""

    def __init__(self, width: int) -> None:
        g = GraphBuilder("attention")
        query = g.input("query", "float32", ["batch", "rows", HEADS * width])
        rows = g.input("rows_in", "float32", ["batch", "rows", width])
        past = g.input("past_key_values.0.latent", "float32", ["batch", 1, "capacity", width])
        length = g.input("past_length", "int64", ["batch"])
        output, present = g.op_multi(
            "LatentAttention", query, rows, past, length, outputs=("output", "present"), domain=DOMAIN, num_heads=HEADS
        )
        g.output("output", output, "float32", ["batch", "rows", HEADS * width])
        g.output("present.0.latent", present, "float32", ["batch", 1, "capacity", width])
        model = lower(g.model(domains=[DOMAIN]))
        stored = next(value.shape for value in model.graph.inputs if value.name == "past_key_values.0.latent")
        self.stored = int(stored[3])
        self._width = width
        payload = ir.to_proto(model).SerializeToString()
        self._session = ort.InferenceSession(payload, providers=["CPUExecutionProvider"])
        draw = np.random.default_rng(0).standard_normal
        self._query = draw((1, MOST_ROWS, HEADS * width)).astype(np.float32)
        self._rows = draw((1, MOST_ROWS, width)).astype(np.float32)
        self._cache = np.zeros((1, 1, CAPACITY, self.stored), np.float32)
        self._cache[..., :width] = draw((1, 1, CAPACITY, width))

    def run(self, past: int, rows: int) -> np.ndarray:
        """float32[rows, HEADS * width] behind `past` cached rows."""
        cache = self._cache.copy()
        output = np.zeros((1, rows, HEADS * self._width), np.float32)
        inputs = {
            "query": np.ascontiguousarray(self._query[:, :rows]),
            "rows_in": np.ascontiguousarray(self._rows[:, :rows]),
            "past_key_values.0.latent": cache,
            "past_length": np.array([past]),
        }
        outputs = {"output": output, "present.0.latent": cache, "present.0.latent.again": cache}
        Bound(self._session, inputs, outputs).run()
        return output[0]

    def differing_lengths(self) -> list[int]:
        """Cached lengths at which some call of fewer rows differs from one of the most."""
        found = []
        for past in range(CAPACITY - MOST_ROWS - 2):
            whole = self.run(past, MOST_ROWS)
            if any(not np.array_equal(self.run(past, rows), whole[:rows]) for rows in range(1, MOST_ROWS)):
                found.append(past)
        return found


@pytest.mark.parametrize(("width", "stored"), [(20, 24), (72, 72), (144, 256), (192, 256), (576, 1024)])
def test_rows_do_not_depend_on_their_number_at_any_length(width: int, stored: int) -> None:
    attention = Attention(width)
    assert attention.stored == stored
    seen = first_difference(stored)
    if seen is not None:
        assert seen in attention.differing_lengths(), "what the trial sees is there"
        pytest.skip(f"this processor's kernel splits rows of {stored}, and engines say so")
    assert attention.differing_lengths() == []


def test_control_without_the_padding_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_attention, "stored_width", lambda width: width)
    monkeypatch.setattr("mtp_engines.lowering.onnxruntime_cpu.stored_width", lambda width: width)
    attention = Attention(576)
    assert attention.stored == 576
    if not attention.differing_lengths():
        pytest.skip("this processor's kernel does not split rows of 576")
