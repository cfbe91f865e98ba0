"""`DeltaRule` and `DeltaCommit` against the reference, row by row and all at once."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest

from mtp_engines.contracts import names
from mtp_engines.contracts.model import GatedDeltaSpec
from mtp_engines.lowering.factors import packed
from mtp_engines.lowering.own_kernels import KERNELS
from mtp_plugins.gated_delta.reference import gated_delta, unit_rows
from mtp_plugins.graph import DOMAIN, GraphBuilder

from .sessions import normal, open_lowered, open_model

Shape = tuple[int, int, int, int]
"""Key heads, value heads, width of a key, width of a value."""
SHAPES: list[Shape] = [(2, 4, 16, 16), (1, 3, 24, 40), (2, 2, 128, 128), (1, 1, 7, 5), (3, 6, 33, 64)]
Rows = list[np.ndarray]


def open_rule(shape: Shape, threads: int = 1) -> ort.InferenceSession:
    key_heads, value_heads, key_dim, value_dim = shape
    g = GraphBuilder("delta")
    widths = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim, value_heads, value_heads)
    named = zip(("query", "key", "value", "decay", "beta"), widths, strict=True)
    rows = [g.input(name, "float32", ["batch", "rows", width]) for name, width in named]
    state_shape = ["batch", value_heads, key_dim, value_dim]
    past = g.input("past", "float32", state_shape)
    outputs = g.op_multi(
        "GatedDelta",
        *(*rows, past),
        outputs=("output", "present", "unit_key"),
        domain=DOMAIN,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
    )
    shapes = (["batch", "rows", widths[2]], state_shape, ["batch", "rows", widths[1]])
    for name, value, axes in zip(("output", "present", "unit_key"), outputs, shapes, strict=True):
        g.output(name, value, "float32", axes)
    return open_lowered(g, threads)


def given(shape: Shape, rows: int, batch: int = 2) -> tuple[Rows, np.ndarray]:
    """Query, key, value, decay and beta of some rows, and a state."""
    key_heads, value_heads, key_dim, value_dim = shape
    widths = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim, value_heads, value_heads)
    found = [normal(seed, batch, rows, width) for seed, width in enumerate(widths)]
    found[3] = -np.abs(found[3])
    found[4] = (1 / (1 + np.exp(-found[4]))).astype(np.float32)
    return found, normal(9, batch, value_heads, key_dim, value_dim)


def run(session: ort.InferenceSession, rows: Rows, past: np.ndarray) -> Rows:
    feeds = dict(zip(("query", "key", "value", "decay", "beta"), rows, strict=True)) | {"past": past}
    return list(session.run(["output", "present", "unit_key"], feeds))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_are_those_of_the_reference(shape: Shape, rows: int) -> None:
    key_heads, value_heads, key_dim, value_dim = shape
    x, past = given(shape, rows)
    output, present, unit_key = run(open_rule(shape), x, past)
    for sequence in range(2):
        query, key, value, decay, beta = (part[sequence].astype(np.float64) for part in x)
        heads = (rows, key_heads, key_dim)
        expected, state = gated_delta(
            query.reshape(heads),
            key.reshape(heads),
            value.reshape(rows, value_heads, value_dim),
            decay,
            beta,
            past[sequence].astype(np.float64),
        )
        np.testing.assert_allclose(output[sequence], expected.reshape(rows, -1), atol=2e-5, rtol=1e-4)
        np.testing.assert_allclose(present[sequence], state, atol=2e-5, rtol=1e-4)
        np.testing.assert_allclose(unit_key[sequence], unit_rows(key.reshape(heads)).reshape(rows, -1), atol=1e-6)
        faded, _ = gated_delta(
            query.reshape(heads),
            key.reshape(heads),
            value.reshape(rows, value_heads, value_dim),
            decay * 0,
            beta,
            past[sequence].astype(np.float64),
        )
        assert np.abs(faded.reshape(rows, -1) - output[sequence]).max() > 1e-2, "control: a missed decay is seen"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_do_not_depend_on_how_many_a_call_has(shape: Shape, threads: int) -> None:
    session = open_rule(shape, threads)
    x, past = given(shape, 17)
    together, last, _ = run(session, x, past)
    state, first = past, 0
    for rows in (1, 2, 1, 4, 9):
        output, state, _ = run(session, [part[:, first : first + rows] for part in x], state)
        np.testing.assert_array_equal(output, together[:, first : first + rows])
        first += rows
    np.testing.assert_array_equal(state, last)
    alone, _, _ = run(session, [part[1:, :3] for part in x], past[1:])
    np.testing.assert_array_equal(alone, together[1:, :3])
    assert (run(session, x, past * np.float32(1.000001))[0] != together).any(), "control: a millionth is seen"


@pytest.mark.parametrize("part", range(1, 5))
def test_rows_that_do_not_fit_are_refused(part: int) -> None:
    session, (x, past) = open_rule(SHAPES[0]), given(SHAPES[0], 3)
    wrong = [rows[:, :2] if number == part else rows for number, rows in enumerate(x)]
    with pytest.raises(Exception, match="do not fit together"):
        run(session, wrong, past)
    with pytest.raises(Exception, match="do not fit together"):
        run(session, x, past[:1])


def mixer_of(shape: Shape, taps: int = 4) -> GatedDeltaSpec:
    key_heads, value_heads, key_dim, value_dim = shape
    return GatedDeltaSpec(
        key_heads=key_heads,
        value_heads=value_heads,
        key_head_dim=key_dim,
        value_head_dim=value_dim,
        conv_kernel=taps,
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_commit_leaves_the_bits_that_a_call_of_the_kept_rows_leaves(shape: Shape) -> None:
    from mtp_engines.lowering import own_kernels

    mixer, rows, kept = mixer_of(shape), 5, np.array([2, 5, 0, 4])
    x, past = given(shape, rows, batch=len(kept))
    _, _, unit_key = run(open_rule(shape), x, past)
    raw, past_raw = normal(20, len(kept), rows, mixer.conv_width), normal(21, len(kept), 3, mixer.conv_width)

    class OneLayer:
        def delta_layers(self) -> list[tuple[int, GatedDeltaSpec]]:
            return [(0, mixer)]

    session = open_model(own_kernels.commit_model(OneLayer()))  # type: ignore[arg-type]
    factors = np.concatenate([raw, unit_key, *x[2:]], axis=-1)
    feeds = {packed(0): factors, names.past_recurrent(0): past, names.past_conv(0): past_raw}
    outputs = [names.present_recurrent(0), names.present_conv(0)]
    state, last_raw = session.run(outputs, feeds | {names.ACCEPTED_ROWS: kept})
    for sequence, count in enumerate(kept):
        expected = past[sequence]
        if count:
            parts = [part[sequence : sequence + 1, :count] for part in x]
            expected = run(open_rule(shape), parts, past[sequence : sequence + 1])[1][0]
        np.testing.assert_array_equal(state[sequence], expected)
        window = np.concatenate([past_raw[sequence], raw[sequence]])
        np.testing.assert_array_equal(last_raw[sequence], window[count : count + 3])
    other, _ = session.run(outputs, feeds | {names.ACCEPTED_ROWS: kept - (kept == 4)})
    assert (other[3] != state[3]).any(), "control: one row fewer is seen"
    with pytest.raises(Exception, match="more rows than there are"):
        session.run(outputs, feeds | {names.ACCEPTED_ROWS: kept + 1})
    assert KERNELS in {node.domain for node in own_kernels.commit_model(OneLayer()).graph}  # type: ignore[arg-type]
