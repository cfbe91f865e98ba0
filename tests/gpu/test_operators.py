"""Every standard operator of the interpreter against ONNX Runtime, or the reference of ONNX where it has none."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as HasNone

from mtp_engines.backends.torch import call, interpreter
from mtp_engines.backends.torch.call import Call, Values
from mtp_engines.errors import BundleError
from tests.gpu.operator_cases import OperatorCase, cases, floats, i64

CPU = torch.device("cpu")


def expected(case: OperatorCase) -> list[np.ndarray]:
    """Outputs by ONNX Runtime without its optimizer, or by the reference of ONNX."""
    model = case.model()
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except HasNone:
        return list(ReferenceEvaluator(model).run(None, case.feeds()))
    return list(session.run(None, case.feeds()))


def interpreted(case: OperatorCase, wanted: list[np.ndarray]) -> list[np.ndarray]:
    """Outputs by the interpreter, which is given buffers of the wanted shapes."""
    model = case.model()
    run = interpreter.Interpreter(ir.from_proto(model), CPU)
    feeds = {name: torch.from_numpy(np.array(value)) for name, value in case.feeds().items()}
    before = {name: value.clone() for name, value in feeds.items()}
    into = {f"y{place}": torch.from_numpy(np.zeros_like(value)) for place, value in enumerate(wanted)}
    run.run(feeds, into)
    for name, value in feeds.items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), f"{case.name} changed its input"
    return [value.numpy() for value in into.values()]


def differences(case: OperatorCase) -> list[str]:
    """What the two do not agree on."""
    wanted = expected(case)
    found = []
    for place, (ours, theirs) in enumerate(zip(interpreted(case, wanted), wanted, strict=True)):
        same = (
            np.array_equal(ours, theirs, equal_nan=theirs.dtype.kind == "f")
            if case.equal
            else np.allclose(ours, theirs, rtol=2e-6, atol=1e-6, equal_nan=True)
        )
        if ours.dtype != theirs.dtype or not same:
            found.append(f"{case.name} {case.attributes} output {place}: {ours} instead of {theirs}")
    return found


@pytest.mark.parametrize("name", sorted(call.OPERATORS))
def test_a_standard_operator_does_what_onnx_runtime_does(name: str) -> None:
    found = [case for case in cases() if case.name == name]
    assert found, "an operator without a case"
    assert [text for case in found for text in differences(case)] == []


@pytest.mark.parametrize("name", sorted(call.OPERATORS))
def test_control_a_wrong_operator_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another value in the last place of the last output of each operator."""
    right = call.OPERATORS[name]

    def wrong(given: Call) -> Values:
        values = [value.clone() for value in right(given)]
        flat = values[-1].reshape(-1)
        if flat.numel():
            flat[-1] = ~flat[-1] if flat.dtype == torch.bool else torch.nan_to_num(flat[-1]) + 1
            values[-1] = flat.reshape(values[-1].shape)
        return values

    monkeypatch.setitem(call.OPERATORS, name, wrong)
    assert [text for case in cases() if case.name == name for text in differences(case)]


TIES = next(case for case in cases() if case.name == "ArgMax" and case.attributes["axis"] == -1)
UNEVEN = next(case for case in cases() if case.name == "Split" and "num_outputs" in case.attributes)
TOWARD_ZERO = next(case for case in cases() if case.name == "Div" and case.inputs[0].dtype == np.int64)
FAULTS = {
    "the last of equal values": (
        TIES,
        lambda x: [x[0].shape[-1] - 1 - x[0].flip(-1).argmax(-1, keepdim=bool(x.attributes["keepdims"]))],
    ),
    "integers divided to the floor": (TOWARD_ZERO, lambda x: [torch.div(x[0], x[1], rounding_mode="floor")]),
    "a longer last part": (UNEVEN, lambda x: list(torch.split(x[0], [2, 2, 3], 0))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_subtly_wrong_operator_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, wrong = FAULTS[fault]
    assert differences(case) == []
    monkeypatch.setitem(call.OPERATORS, case.name, wrong)
    if fault == "a longer last part":
        with pytest.raises(RuntimeError, match="must match the size"):
            differences(case)
    else:
        assert differences(case)


def test_a_value_that_is_none_gives_a_place_inside_the_axis() -> None:
    """Where ONNX says nothing: whatever the place is, it is one of the vocabulary."""
    x = torch.tensor([[1.0, float("nan"), 3.0], [float("nan")] * 3])
    (places,) = call.OPERATORS["ArgMax"](Call([x], {"axis": -1, "keepdims": 0}, 1, CPU))
    assert places.tolist() == [2, 2]


def test_an_operator_that_is_not_there_is_refused_in_one_sentence() -> None:
    case = OperatorCase("Erf", [np.zeros(2, np.float32)])
    with pytest.raises(BundleError, match=r"no operator Erf\. Run the bundle with --backend onnxruntime\.$"):
        interpreted(case, [np.zeros(2, np.float32)])


REFUSED = [
    (OperatorCase("ArgMax", [floats(2, 3)], {"axis": 1, "select_last_index": 1}), "select_last_index"),
    (OperatorCase("TopK", [floats(2, 3), i64(1)], {"largest": 0}, outputs=2), "largest"),
    (OperatorCase("Pad", [floats(4), i64(1, 1)], {"mode": "edge"}), "mode"),
    (OperatorCase("Slice", [floats(4), i64(0), i64(4), i64(0), i64(2)]), "x4"),
]


@pytest.mark.parametrize(("case", "what"), REFUSED, ids=[what for _, what in REFUSED])
def test_what_would_be_left_out_of_account_is_refused(case: OperatorCase, what: str) -> None:
    with pytest.raises(BundleError, match=f"no operator {case.name} with {what}"):
        interpreted(case, expected(case))


def test_a_body_of_a_loop_sees_values_around_it() -> None:
    """A value that only the body reads lives until the loop runs."""
    text = """<ir_version: 10, opset_import: ["" : 24]>
    outer (float[2] s0, float[3, 2] xs, float[2] w) => (float[2] s, float[3, 2] ys) {
        doubled = Add(w, w)
        used = Neg(doubled)
        start = Add(s0, used)
        s, ys = Scan <num_scan_inputs = 1,
            body = step (float[2] a, float[2] x) => (float[2] b, float[2] y) {
                scaled = Mul(x, doubled)
                b = Add(a, scaled)
                y = Identity(b)
            }> (start, xs)
    }"""
    model = onnx.parser.parse_model(text)
    feeds = {
        "s0": np.ones(2, np.float32),
        "xs": np.arange(6, dtype=np.float32).reshape(3, 2),
        "w": np.array([2.0, 3.0], np.float32),
    }
    want = ReferenceEvaluator(model).run(None, feeds)
    into = {"s": torch.zeros(2), "ys": torch.zeros(3, 2)}
    interpreter.Interpreter(ir.from_proto(model), CPU).run(
        {name: torch.from_numpy(value) for name, value in feeds.items()}, into
    )
    np.testing.assert_array_equal(into["s"].numpy(), want[0])
    np.testing.assert_array_equal(into["ys"].numpy(), want[1])
