"""`ShortConvolution` against the sum it stands for, and rows and channels that do not depend on each other."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from mtp_plugins.graph import DOMAIN, GraphBuilder

from .sessions import constant, normal, open_lowered


def open_convolution(channels: int, taps: int, threads: int = 1) -> ort.InferenceSession:
    g = GraphBuilder("convolution")
    x = g.input("x", "float32", ["batch", "rows", channels])
    past = g.input("past", "float32", ["batch", taps - 1, channels])
    weight = constant(g, "weight", normal(1, channels, 1, taps))
    output, present = g.op_multi("CausalConvState", x, weight, past, outputs=("output", "present"), domain=DOMAIN)
    g.output("output", output, "float32", ["batch", "rows", channels])
    g.output("present", present, "float32", ["batch", taps - 1, channels])
    return open_lowered(g, threads)


def run(session: ort.InferenceSession, x: np.ndarray, past: np.ndarray) -> list[np.ndarray]:
    return list(session.run(["output", "present"], {"x": x, "past": past}))


def expected_of(x: np.ndarray, past: np.ndarray, weight: np.ndarray) -> np.ndarray:
    window = np.concatenate([past, x], axis=1).astype(np.float64)
    taps = weight.shape[2]
    total = sum(window[:, tap : tap + x.shape[1]] * weight[:, 0, tap] for tap in range(taps))
    return np.asarray(total / (1 + np.exp(-total)))


@pytest.mark.parametrize("channels", [1, 8, 13, 512, 1300])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_outputs_and_the_rows_that_are_kept(channels: int, taps: int) -> None:
    session = open_convolution(channels, taps)
    for rows in (1, 2, 9):
        x, past = 3 * normal(2, 2, rows, channels), 3 * normal(3, 2, taps - 1, channels)
        output, present = run(session, x, past)
        weight = normal(1, channels, 1, taps)
        np.testing.assert_allclose(output, expected_of(x, past, weight), atol=2e-6, rtol=2e-5)
        np.testing.assert_array_equal(present, np.concatenate([past, x], axis=1)[:, rows:])
        if taps > 1:
            turned = expected_of(x, past[:, ::-1], weight) - output
            assert taps == 2 or np.abs(turned).max() > 1e-3, "control: rows in another order are seen"


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_how_many_a_call_has(threads: int) -> None:
    session = open_convolution(1300, 4, threads)
    x, past = normal(4, 2, 20, 1300), normal(5, 2, 3, 1300)
    together, last = run(session, x, past)
    state, first = past, 0
    for rows in (1, 2, 1, 5, 11):
        output, state = run(session, x[:, first : first + rows], state)
        np.testing.assert_array_equal(output, together[:, first : first + rows])
        first += rows
    np.testing.assert_array_equal(state, last)
    assert (run(session, x * np.float32(1.000001), past)[0] != together).any(), "control: a millionth is seen"


def test_great_and_unfit_numbers() -> None:
    session = open_convolution(8, 1)
    x = np.array([[[-200, -90, 0, 90, 200, np.nan, np.inf, 1]]], np.float32)
    output, _ = run(session, x / normal(1, 8, 1, 1)[:, 0, 0], np.zeros((1, 0, 8), np.float32))
    np.testing.assert_allclose(output[0, 0, [0, 1, 2, 3, 4, 7]], [0, 0, 0, 90, 200, 0.7310586], atol=1e-6, rtol=1e-5)
    assert np.isnan(output[0, 0, 5])
    assert not np.isfinite(output[0, 0, 6])
