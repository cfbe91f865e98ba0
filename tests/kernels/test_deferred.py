"""`DeferredDeltaRule` and `DeferredShortConvolution`: the bits of a commit, then of the rows behind it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.contracts import names
from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_engines.lowering.pending import KEEPS_ROWS, PENDING_ROWS, defer_commits, pending
from mtp_plugins.graph import DOMAIN, GraphBuilder

from .sessions import constant, normal, open_model
from .test_delta import SHAPES, Shape, given

LAYER, TAPS, BATCH = 3, 4, 2


def layer(shape: Shape, deferred: bool, threads: int = 1) -> ort.InferenceSession:
    """A convolution and a recurrence that do not meet, over the states of one layer."""
    key_heads, value_heads, key_dim, value_dim = shape
    widths = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim, value_heads, value_heads)
    channels = 2 * widths[0] + widths[2]
    g = GraphBuilder("layer")
    named = zip(("query", "key", "value", "decay", "beta"), widths, strict=True)
    rows = [g.input(name, "float32", ["batch", "rows", width]) for name, width in named]
    x = g.input("x", "float32", ["batch", "rows", channels])
    state_shape, conv_shape = ["batch", value_heads, key_dim, value_dim], ["batch", TAPS - 1, channels]
    past = g.input(names.past_recurrent(LAYER), "float32", state_shape)
    past_conv = g.input(names.past_conv(LAYER), "float32", conv_shape)
    heads = {"num_key_heads": key_heads, "num_value_heads": value_heads}
    output, present, unit_key = g.op_multi(
        "GatedDelta", *rows, past, outputs=("output", "present", "unit_key"), domain=DOMAIN, **heads
    )
    weight = constant(g, "weight", normal(20, channels, 1, TAPS))
    conv, present_conv = g.op_multi(
        "CausalConvState", x, weight, past_conv, outputs=("conv", "present_conv"), domain=DOMAIN
    )
    for name, value, axes in (
        ("output", output, ["batch", "rows", widths[2]]),
        ("present", present, state_shape),
        ("unit_key", unit_key, ["batch", "rows", widths[1]]),
        ("conv", conv, ["batch", "rows", channels]),
        ("present_conv", present_conv, conv_shape),
    ):
        g.output(name, value, "float32", axes)
    model: ir.Model = lower(g.model(domains=[DOMAIN]), packed=PackedMatrices())
    return open_model(defer_commits(model) if deferred else model, threads)


class Rows:
    """Rows of a layer, and the factors that they leave."""

    def __init__(self, shape: Shape, count: int, seed: int) -> None:
        (query, key, value, decay, beta), _ = given(shape, count, BATCH)
        mixed = [np.roll(part, seed, axis=-1) for part in (query, key, value)]
        channels = 2 * key.shape[-1] + value.shape[-1]
        names_ = ("query", "key", "value", "decay", "beta", "x")
        arrays = (*mixed, decay, beta, normal(30 + seed, BATCH, count, channels))
        self.feeds = dict(zip(names_, arrays, strict=True))

    def factors(self, unit_key: np.ndarray) -> np.ndarray:
        f = self.feeds
        return np.concatenate([f["x"], unit_key, f["value"], f["decay"], f["beta"]], axis=-1)

    def first(self, count: int) -> dict[str, np.ndarray]:
        return {name: array[:, :count] for name, array in self.feeds.items()}


def states(shape: Shape, rows: Rows) -> dict[str, np.ndarray]:
    _, past = given(shape, 1, BATCH)
    conv = normal(40, BATCH, TAPS - 1, rows.feeds["x"].shape[-1])
    return {names.past_recurrent(LAYER): past, names.past_conv(LAYER): conv}


def run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    outputs = [value.name for value in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kept", [[0, 0], [1, 3], [5, 0], [2, 2], [5, 5]])
@pytest.mark.parametrize("keeps", [0, 1])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_are_those_of_rows_that_were_run_before(shape: Shape, kept: list[int], keeps: int, threads: int) -> None:
    plain, late = layer(shape, False), layer(shape, True, threads)
    before, rows = Rows(shape, 5, 1), Rows(shape, 3, 2)
    past = states(shape, before)
    factors = before.factors(run(plain, {**before.feeds, **past})["unit_key"])
    waiting = {pending(LAYER): factors, PENDING_ROWS: np.array(kept), KEEPS_ROWS: np.array([keeps])}
    got = run(late, {**rows.feeds, **past, **waiting})
    for sequence, count in enumerate(kept):
        settled = run(plain, {**before.first(count), **past}) if count else {}
        middle = {
            names.past_recurrent(LAYER): settled.get("present", past[names.past_recurrent(LAYER)]),
            names.past_conv(LAYER): settled.get("present_conv", past[names.past_conv(LAYER)]),
        }
        wanted = run(plain, {**rows.feeds, **middle})
        for name in ("output", "conv", "unit_key"):
            np.testing.assert_array_equal(got[name][sequence], wanted[name][sequence], err_msg=name)
        left = wanted if keeps else settled
        if keeps or count:
            np.testing.assert_array_equal(got["present"][sequence], left["present"][sequence])
        conv = left["present_conv"] if left else past[names.past_conv(LAYER)]
        np.testing.assert_array_equal(got["present_conv"][sequence], conv[sequence])
    if max(kept) > 1:
        fewer = {**waiting, PENDING_ROWS: np.maximum(np.array(kept) - 1, 0)}
        other = run(late, {**rows.feeds, **past, **fewer})
        for name in ("output", "conv"):
            assert (other[name] != got[name]).any(), "control: a row too few is seen"


@pytest.mark.parametrize("wrong", ["more rows than there are", "a negative number", "another width", "two flags"])
def test_rows_that_do_not_fit_are_refused(wrong: str) -> None:
    shape = SHAPES[0]
    late, rows = layer(shape, True), Rows(shape, 3, 2)
    factors, counts, keeps = rows.factors(rows.feeds["key"]), np.array([1, 2]), np.array([1])
    if wrong == "more rows than there are":
        counts = np.array([1, 4])
    elif wrong == "a negative number":
        counts = np.array([-1, 1])
    elif wrong == "another width":
        factors = factors[..., :50].copy()
    else:
        keeps = np.array([1, 1])
    waiting = {pending(LAYER): factors, PENDING_ROWS: counts, KEEPS_ROWS: keeps}
    with pytest.raises(Exception, match=r"rows before its own that do not fit|Got invalid dimensions"):
        run(late, {**rows.feeds, **states(shape, rows), **waiting})
