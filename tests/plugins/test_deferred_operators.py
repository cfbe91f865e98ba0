"""The ONNX bodies of the operators that commit on the device, against their references, and references themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.registry import OPERATORS
from tests.plugins import deferred_delta_cases as delta
from tests.plugins import test_kernels_accept as accepting
from tests.plugins import test_kernels_deferred_conv as conv
from tests.plugins.ptx_cases import CASES
from tests.plugins.workers import Arrays

SIZES = delta.Sizes(batch=5, rows=3, staged_rows=4, key_heads=2, value_heads=4)
TOLERANCE = 5e-6
FAULT = 1e-2


def run(name: str, x: Arrays) -> Arrays:
    """Outputs of the operator's body in ONNX Runtime."""
    operator = OPERATORS[name]
    g = GraphBuilder(name)
    values = []
    for key in operator.inputs:
        fixed = key in ("weight", "past_state")
        shape = [size if fixed else f"{key}.{axis}" for axis, size in enumerate(x[key].shape)]
        values.append(g.input(key, str(x[key].dtype), shape))
    results = g.op_multi(name, *values, outputs=operator.outputs, domain=DOMAIN)
    for key, value in zip(operator.outputs, results, strict=True):
        rank = {"accepted": 1, "accepted_rows": 1, "next_token": 1, "emitted": 2}.get(key, 3)
        rank = 4 if key == "present_state" and name == "DeferredDelta" else rank
        ids = {"accepted": "int32", "accepted_rows": "int32", "next_token": "int64", "emitted": "int64"}
        g.output(key, value, ids.get(key, "float32"), [f"{key}.{axis}" for axis in range(rank)])
    payload = ir.to_proto(g.model([operator.function()], [DOMAIN])).SerializeToString()
    opened = ort.InferenceSession(payload, providers=["CPUExecutionProvider"])
    return dict(zip(operator.outputs, opened.run(list(operator.outputs), x), strict=True))


KEPT = {"none": (0, 0, 0, 0, 0), "some": (0, 3, 1, 2, 3)}
ROWS = [3, 6]
"""Below and above what a call leaves for the next."""


def counted(x: Arrays, kept: str) -> Arrays:
    return x | {"kept_rows": np.array(KEPT[kept], np.int32)}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("scale", [1.0, 3e-4])
def test_the_body_of_deferred_delta_equals_its_reference(scale: float, kept: str, rows: int) -> None:
    sizes = replace(SIZES, rows=rows)
    x = counted(delta.feeds(sizes, scale=scale), kept)
    assert set(x["accepted_rows"]) == set(range(5))
    got = run("DeferredDelta", x)
    assert all(got[f"next_{name}"].shape == x[f"staged_{name}"].shape for name in delta.STAGED)
    assert delta.difference(got, delta.reference(sizes, x)) < TOLERANCE
    for wrong in wrong_counts(x):
        assert delta.difference(got, delta.reference(sizes, wrong)) > FAULT, "control: this test cannot see a count"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kept", KEPT)
def test_the_body_of_deferred_conv_equals_its_reference(kept: str, rows: int) -> None:
    x = counted(conv.feeds(rows=rows), kept)
    got = run("DeferredConv", x)
    assert got["next_x"].shape == x["staged_x"].shape
    assert conv.difference(got, conv.reference(x)) < TOLERANCE
    for wrong in wrong_counts(x):
        assert conv.difference(got, conv.reference(wrong)) > FAULT, "control: this test cannot see a count"


def wrong_counts(x: Arrays) -> list[Arrays]:
    """Each count wrong by one."""
    kept = np.where(x["kept_rows"] > 0, x["kept_rows"] - 1, 1).astype(np.int32)
    return [x | {"accepted_rows": np.maximum(x["accepted_rows"] - 1, 0)}, x | {"kept_rows": kept}]


@pytest.mark.parametrize("name", ["DeferredDelta", "DeferredConv"])
def test_a_body_reads_no_row_that_is_not_accepted(name: str) -> None:
    x = counted(delta.feeds(SIZES) if name == "DeferredDelta" else conv.feeds(), "some")
    clean = run(name, x)
    dirty = {key: x[key].copy() for key in x if "staged" in key}
    for b, count in enumerate(x["accepted_rows"]):
        for value in dirty.values():
            value[b, count:] = np.nan
    for key, value in run(name, x | dirty).items():
        np.testing.assert_array_equal(value, clean[key])


@pytest.mark.parametrize("draft_tokens", [0, 1, 5])
def test_the_body_of_accept_equals_its_reference(draft_tokens: int) -> None:
    x = accepting.feeds(draft_tokens)
    got, want = run("Accept", x), accepting.reference(x)
    assert set(want["accepted"]) == set(range(draft_tokens + 1))
    for key, value in want.items():
        np.testing.assert_array_equal(got[key], value, err_msg=key)
        assert got[key].dtype == value.dtype


def test_what_is_staged_and_accepted_is_what_was_run() -> None:
    """The reference against GatedDelta's own: rows run at once, and the same rows committed in two calls."""
    sizes = delta.Sizes(batch=1, rows=5, staged_rows=5)
    x = delta.feeds(sizes) | {"accepted_rows": np.zeros(1, np.int32)}
    whole = delta.reference(sizes, x)
    staged = {f"staged_{key}": whole[f"next_{key}"] for key in delta.STAGED}
    rest = {key: x[key][:, 3:] for key in delta.NEW_ROWS}
    second = x | staged | rest | {"past_state": whole["present_state"], "accepted_rows": np.array([3], np.int32)}
    later = delta.reference(sizes, second)
    np.testing.assert_allclose(later["output"], whole["output"][:, 3:], rtol=0, atol=1e-12)
    at_once = delta.reference(sizes, x | {"kept_rows": np.array([3], np.int32)})
    np.testing.assert_allclose(at_once["present_state"], later["present_state"], rtol=0, atol=1e-12)


WITH_KERNELS = sorted({case().folder for case in CASES.values()})


def test_the_package_needs_neither_triton_nor_torch() -> None:
    code = (
        "import sys; sys.modules |= {'triton': None, 'torch': None}; import mtp_plugins.triton_kernels.ptx, importlib\n"
        f"for name in {WITH_KERNELS}: importlib.import_module(f'mtp_plugins.{{name}}.launch')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    refused = subprocess.run([sys.executable, "-c", code + "\nimport triton"], capture_output=True, text=True)
    assert re.search("import of triton halted", refused.stderr), "control: an import would have been refused"
