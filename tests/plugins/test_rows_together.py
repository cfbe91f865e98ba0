"""The delta rule without a loop against its NumPy reference, row by row, with controls."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_plugins.gated_delta.body import body_with
from mtp_plugins.gated_delta.reference import gated_delta
from mtp_plugins.gated_delta.together import rows_together
from mtp_plugins.graph import GraphBuilder

BATCH, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 2, 6, 8, 5
# float32 against float64; values up to 5. A wrong term moves them by more than 1e-2.
TOLERANCE = 2e-5
Feed = dict[str, np.ndarray]


def feed_of(rows: int, *, alike: bool = False) -> Feed:
    """Random rows; `alike` ones have nearly the same key, are written whole and hardly fade."""
    draw = np.random.default_rng(rows).standard_normal
    keys = draw((BATCH, rows, KEY_HEADS * KEY_DIM))
    feed = {
        "query": draw((BATCH, rows, KEY_HEADS * KEY_DIM)),
        "key": keys[:, :1] + 1e-2 * keys if alike else keys,
        "value": draw((BATCH, rows, VALUE_HEADS * VALUE_DIM)),
        "decay": -np.abs(draw((BATCH, rows, VALUE_HEADS))) * (1e-3 if alike else 3),
        "beta": 1 / (1 + np.exp(-draw((BATCH, rows, VALUE_HEADS)))) * (0 if alike else 1) + (1 if alike else 0),
        "past_state": draw((BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM)),
    }
    return {name: array.astype(np.float32) for name, array in feed.items()}


def run(feed: Feed, most_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Output and state of the form without a loop."""
    g = GraphBuilder("together")
    inputs = [g.input(name, "float32", [f"{name}{axis}" for axis in range(x.ndim)]) for name, x in feed.items()]
    results = body_with(g, inputs, partial(rows_together, most_rows=most_rows))
    for name, value, array in zip(("output", "state"), results[:2], (feed["value"], feed["past_state"]), strict=True):
        g.output(name, value, "float32", [f"{name}.{axis}" for axis in range(array.ndim)])
    session = ort.InferenceSession(ir.to_proto(g.model()).SerializeToString())
    output, state = session.run(["output", "state"], feed)
    return output, state


def expected(feed: Feed) -> tuple[np.ndarray, np.ndarray]:
    """The reference in float64."""
    outputs, states = [], []
    for index in range(BATCH):
        one = {name: array[index].astype(np.float64) for name, array in feed.items()}
        query, key = (one[name].reshape(-1, KEY_HEADS, KEY_DIM) for name in ("query", "key"))
        value = one["value"].reshape(-1, VALUE_HEADS, VALUE_DIM)
        output, state = gated_delta(query, key, value, one["decay"], one["beta"], one["past_state"])
        outputs.append(output.reshape(one["value"].shape))
        states.append(state)
    return np.stack(outputs), np.stack(states)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 16, 64, 200])
def test_every_number_of_rows_equals_the_rows_one_by_one(rows: int) -> None:
    feed = feed_of(rows)
    for got, want in zip(run(feed, 256), expected(feed), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_rows_that_are_much_alike_stay_finite_and_right() -> None:
    """Powers of their coupling matrix would reach 1e30; only sums of a substitution occur."""
    feed = feed_of(128, alike=True)
    for got, want in zip(run(feed, 128), expected(feed), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-3)


def test_control_a_form_for_fewer_rows_is_wrong_beyond_them() -> None:
    feed = feed_of(16)
    np.testing.assert_allclose(run(feed, 16)[0], expected(feed)[0], rtol=0, atol=TOLERANCE)
    short = run(feed, 8)[0]
    np.testing.assert_allclose(short[:, :8], expected(feed)[0][:, :8], rtol=0, atol=TOLERANCE)
    assert np.abs(short[:, 8:] - expected(feed)[0][:, 8:]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["decay", "beta", "past_state", "key"])
def test_control_every_input_is_seen(name: str) -> None:
    feed = feed_of(5)
    want = expected(feed)[0]
    changed = feed | {name: feed[name] * np.float32(0.9) + np.float32(0.05)}
    assert np.abs(run(changed, 8)[0] - want).max() > 100 * TOLERANCE
