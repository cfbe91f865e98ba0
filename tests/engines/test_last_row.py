"""A head that finishes one row gives the bits of that row of a head that finishes all."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph, open_session
from mtp_engines.contracts import names
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.last_row import LAST_ROW, only_last_row
from mtp_engines.lowering.onnxruntime_cpu import lower
from tests.engines.conftest import Case

ROWS, PAST = 5, 3
LAST = np.array([4, 0, 2])


def head(case: Case, *, last_only: bool) -> ir.Model:
    (path,) = case.model.bundle.mtp
    model = without_head(load_graph(path))
    return lower(only_last_row(model) if last_only else model)


def run(case: Case, model: ir.Model, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Three sequences behind caches of random rows; caches are cut to the rows that count."""
    generator = np.random.default_rng(0)
    session = open_session(model, case.model.bundle.mtp[0].parent, threads=1)
    spec = case.model.engine.spec
    feed = {
        names.INPUT_IDS: generator.integers(0, spec.vocab_size, (3, ROWS)),
        names.HIDDEN: generator.standard_normal((3, ROWS, spec.hidden_size), np.float32),
        names.POSITION_IDS: PAST + np.tile(np.arange(ROWS), (3, 1)),
        names.PAST_LENGTH: np.full(3, PAST),
    }
    for value in session.get_inputs():
        if names.is_cache(value.name):
            _, heads, _, width = value.shape
            feed[value.name] = generator.standard_normal((3, heads, 16, width), np.float32)
    if LAST_ROW in {value.name for value in session.get_inputs()}:
        feed[LAST_ROW] = rows[:, None, None]
    found = [value.name for value in session.get_outputs()]
    outputs = dict(zip(found, session.run(found, feed), strict=True))
    return {name: array[:, :, : PAST + ROWS] if names.is_cache(name) else array for name, array in outputs.items()}


def test_one_row_of_each_sequence_comes_out_as_among_all(case: Case) -> None:
    whole, last = (run(case, head(case, last_only=one), LAST) for one in (False, True))
    assert whole.keys() == last.keys()
    (states,) = (name for name in whole if not names.is_cache(name))
    assert last[states].shape == (3, 1, case.model.engine.spec.hidden_size)
    np.testing.assert_array_equal(last[states][:, 0], whole[states][np.arange(3), LAST])
    for name in whole.keys() - {states}:
        np.testing.assert_array_equal(last[name], whole[name], err_msg="the cache has every row all the same")


def test_control_the_row_before_is_another(case: Case) -> None:
    whole, last = (run(case, head(case, last_only=one), np.maximum(LAST - 1, 0)) for one in (False, True))
    (states,) = (name for name in whole if not names.is_cache(name))
    rows = whole[states][np.arange(3), LAST]
    assert [bool((last[states][b, 0] == rows[b]).all()) for b in range(3)] == [False, True, False]


@pytest.mark.parametrize("last_only", [False, True])
def test_what_comes_behind_the_attention_sees_one_row(case: Case, last_only: bool) -> None:
    model = head(case, last_only=last_only)
    gathered = [node for node in model.graph if node.op_type == "GatherND"]
    assert bool(gathered) == last_only
    if last_only:
        # The attention's output, its gate, and the residual stream.
        assert len(gathered) == 3
