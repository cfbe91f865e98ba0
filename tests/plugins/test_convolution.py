"""The short convolution on a CPU: against the reference, and rows that do not depend on how they are cut."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_plugins.causal_conv_state.reference import causal_conv_state
from mtp_plugins.graph import DOMAIN, GraphBuilder

ROWS = 17
SIZES = [(1, 4), (11, 4), (96, 4), (103, 2), (40, 1)]


def opened(weight: np.ndarray) -> ort.InferenceSession:
    channels, _, taps = weight.shape
    g = GraphBuilder("convolution")
    x = g.input("x", "float32", ["batch", "rows", channels])
    past = g.input("past", "float32", ["batch", taps - 1, channels])
    stored = g.constant(weight, "float32")
    stored.shape = ir.Shape(weight.shape)
    output, present = g.op_multi("CausalConvState", x, stored, past, outputs=("output", "present"), domain=DOMAIN)
    g.output("y", output, "float32", ["batch", "rows", channels])
    g.output("after", present, "float32", ["batch", taps - 1, channels])
    payload = ir.to_proto(lower(g.model(domains=[DOMAIN]))).SerializeToString()
    return ort.InferenceSession(payload, providers=["CPUExecutionProvider"])


def drawn(channels: int, taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight, rows and past."""
    draw = np.random.default_rng(channels).standard_normal
    shapes = ((channels, 1, taps), (2, ROWS, channels), (2, taps - 1, channels))
    weight, x, past = (draw(shape).astype(np.float32) for shape in shapes)
    return weight, x, past


@pytest.mark.parametrize(("channels", "taps"), SIZES)
def test_it_equals_the_reference(channels: int, taps: int) -> None:
    weight, x, past = drawn(channels, taps)
    y, after = opened(weight).run(None, {"x": x, "past": past})
    for b in range(2):
        expected, state = causal_conv_state(x[b], weight, past[b])
        np.testing.assert_allclose(y[b], expected, atol=2e-6)
        np.testing.assert_array_equal(after[b], state)
    if taps > 1:
        (wrong, _) = opened(weight[:, :, ::-1].copy()).run(None, {"x": x, "past": past})
        assert np.abs(wrong - y).max() > 0.1, "control: the order of the taps is seen"


@pytest.mark.parametrize(("channels", "taps"), SIZES)
def test_rows_do_not_depend_on_how_a_text_is_cut(channels: int, taps: int) -> None:
    weight, x, past = drawn(channels, taps)
    session = opened(weight)
    whole, after = session.run(None, {"x": x, "past": past})
    for width in (1, 2, 3, 5, 16):
        parts, state = [], past
        for start in range(0, ROWS, width):
            part, state = session.run(None, {"x": x[:, start : start + width], "past": state})
            parts.append(part)
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole, err_msg=f"{width} rows")
        np.testing.assert_array_equal(state, after)
    alone = session.run(None, {"x": x[1:], "past": past[1:]})[0]
    np.testing.assert_array_equal(alone[0], whole[1])
    if taps > 1:
        other = session.run(None, {"x": x[:, 1:], "past": past})[0]
        assert (other[:, :2] != whole[:, 1:3]).any(), "control: a state that was not carried on is seen"
