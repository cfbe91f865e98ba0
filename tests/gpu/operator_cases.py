"""One small graph for each claim of a standard operator of the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from mtp_plugins.graph import IR_VERSION, OPSET

Array = np.ndarray
_RANDOM = np.random.default_rng(0)
NAN, INF = np.nan, np.inf


@dataclass(frozen=True)
class OperatorCase:
    """One node with its inputs.

    Attributes:
        inputs: None for one that is left out.
        equal: bits have to be the same; otherwise rounding may differ.
    """

    name: str
    inputs: list[Array | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    equal: bool = True

    def model(self) -> onnx.ModelProto:
        """The node as a graph whose outputs have no declared shapes."""
        given = ["" if x is None else f"x{place}" for place, x in enumerate(self.inputs)]
        node = helper.make_node(self.name, given, [f"y{place}" for place in range(self.outputs)], **self.attributes)
        inputs = [
            helper.make_tensor_value_info(f"x{place}", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for place, x in enumerate(self.inputs)
            if x is not None
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
        graph = helper.make_graph([node], "case", inputs, outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)

    def feeds(self) -> dict[str, Array]:
        """The inputs by name."""
        return {f"x{place}": x for place, x in enumerate(self.inputs) if x is not None}


def floats(*shape: int) -> Array:
    """Seeded float32 values around 0."""
    return _RANDOM.standard_normal(shape).astype(np.float32)


def f32(*values: Any) -> Array:
    """float32 values as they are given."""
    return np.array(values, np.float32)


def i64(*values: Any) -> Array:
    """int64 values as they are given."""
    return np.array(values, np.int64)


def cases() -> list[OperatorCase]:
    """All of them."""
    return [*_elementwise(), *_arithmetic(), *_choices(), *_layout(), *_indexed(), *_models(), scan_case()]


def _elementwise() -> list[OperatorCase]:
    a, b = floats(2, 1, 3), floats(4, 1)
    numbers = f32(-1.5, 0, 2, INF, -INF, NAN)
    flags = np.array([True, False, True])
    rounded = {"Exp", "Sqrt", "Reciprocal", "Sigmoid", "Softplus"}
    unary = ("Neg", "Exp", "Sqrt", "Reciprocal", "Sigmoid", "Softplus", "Identity")
    binary = ("Add", "Sub", "Mul", "Div", "Less", "LessOrEqual", "Equal", "Greater", "GreaterOrEqual", "Max", "Min")
    found = [OperatorCase(name, [x], equal=name not in rounded) for name in unary for x in (a, numbers)]
    found += [OperatorCase(name, [x, y]) for name in binary for x, y in ((a, b), (numbers, numbers[::-1].copy()))]
    found += [OperatorCase(name, [flags, flags[::-1].copy()]) for name in ("And", "Or")]
    found += [OperatorCase("Not", [flags]), OperatorCase("Where", [flags, floats(2, 3), floats(1)])]
    found += [OperatorCase("Softplus", [f32(-200, -30, 30, 200)], equal=False)]
    return found


def _arithmetic() -> list[OperatorCase]:
    integers, divisors = i64(7, -7, 7, -7, 0), i64(2, 2, -2, -2, 3)
    found = [OperatorCase(name, [integers, divisors]) for name in ("Div", "Mod")]
    found += [OperatorCase("Cast", [f32(-1.7, 1.7, 0)], {"to": TensorProto.INT64})]
    found += [OperatorCase("Cast", [np.array([True, False])], {"to": TensorProto.FLOAT})]
    found += [OperatorCase("Cast", [f32(1.00390625, 3.0e38)], {"to": TensorProto.FLOAT16})]
    found += [OperatorCase("CastLike", [f32(-1.7, 2.2), i64(0)])]
    found += [OperatorCase("MatMul", [floats(2, 1, 3, 4), floats(2, 4, 5)], equal=False)]
    found += [OperatorCase("MatMul", [floats(4), floats(4, 5)], equal=False)]
    found += [OperatorCase("RMSNormalization", [floats(2, 8), floats(8)], {"epsilon": 1e-2}, equal=False)]
    found += [OperatorCase("Softmax", [floats(2, 3, 4)], attributes, equal=False) for attributes in ({}, {"axis": 1})]
    x = floats(2, 3, 4)
    found += [OperatorCase("ReduceSum", [x, i64(-1, 0)], {"keepdims": 0}, equal=False)]
    found += [OperatorCase(name, [x, i64(-2)]) for name in ("ReduceMax", "ReduceMin")]
    found += [OperatorCase(name, [x], {"keepdims": 0}) for name in ("ReduceMax", "ReduceMin")]
    found += [OperatorCase("CumSum", [i64([1, 2, 3], [4, 5, 6]), np.array(axis, np.int64)]) for axis in (0, -1)]
    found += [OperatorCase("CumSum", [np.ones(3, np.int32), np.array(0, np.int64)])]
    return found


def _choices() -> list[OperatorCase]:
    ties = f32([1, 3, 3, 2], [5, 5, 0, 5])
    found = [OperatorCase("ArgMax", [ties], {"axis": axis, "keepdims": keep}) for axis in (0, -1) for keep in (0, 1)]
    found += [OperatorCase("ArgMax", [f32([-INF, -INF], [INF, INF])], {"axis": 1})]
    found += [OperatorCase("TopK", [ties, i64(3)], {"axis": axis}, 2) for axis in (-1, 1)]
    found += [OperatorCase("TopK", [ties, i64(1)], {"axis": 0}, 2)]
    return found


def _layout() -> list[OperatorCase]:
    x = floats(2, 3, 4)
    found = [OperatorCase("Shape", [x], given) for given in ({}, {"start": 1}, {"start": -2, "end": -1}, {"end": 9})]
    found += [OperatorCase("Range", [np.array(v, np.int64) for v in bounds]) for bounds in ((0, 5, 1), (7, 1, -3))]
    found += [OperatorCase("Range", [np.array(v, np.int64) for v in (3, 3, 1)])]
    found += [OperatorCase("Reshape", [x, i64(*shape)]) for shape in ((0, -1), (2, 0, 4), (-1,), (4, 3, 2))]
    found += [OperatorCase("Transpose", [x], {"perm": [2, 0, 1]})]
    found += [OperatorCase("Unsqueeze", [x, i64(*axes)]) for axes in ((0,), (-1,), (3, 0), (-2, 0))]
    found += [OperatorCase("Squeeze", [floats(1, 3, 1), i64(*axes)]) for axes in ((0,), (-1,), (0, 2))]
    found += [OperatorCase("Squeeze", [floats(1, 3, 1)])]
    found += [OperatorCase("Expand", [floats(3, 1), i64(*shape)]) for shape in ((2, 3, 4), (1, 1), (4,), (3, 0))]
    found += [OperatorCase("Expand", [floats(0, 1), i64(1, 2)])]
    found += [OperatorCase("Concat", [x, floats(2, 1, 4), floats(2, 0, 4)], {"axis": axis}) for axis in (1, -2)]
    found += [OperatorCase("Split", [floats(7, 2)], {"num_outputs": 3}, 3)]
    found += [OperatorCase("Split", [x, i64(1, 0, 3)], {"axis": -1}, 3)]
    return [*found, *_slices()]


def _slices() -> list[OperatorCase]:
    x = floats(5, 4)
    bounds = [(1, 3), (-2, 9), (-99, -1), (4, 2), (7, 9), (0, 2**63 - 1), (-(2**63), 2)]
    found = [OperatorCase("Slice", [x, i64(low), i64(high), i64(axis)]) for low, high in bounds for axis in (0, -1)]
    found += [OperatorCase("Slice", [x, i64(1, 0), i64(4, 2)])]
    found += [OperatorCase("Pad", [x, i64(1, 0, 2, 3)]), OperatorCase("Pad", [x, i64(2, 1), None, i64(-1)])]
    return found


def _indexed() -> list[OperatorCase]:
    x, rows = floats(5, 4), i64([0, 4], [2, 2])
    found = [OperatorCase("Gather", [x, rows])]
    found += [OperatorCase("Gather", [x, i64([0], [3])], {"axis": -1})]
    found += [OperatorCase("Gather", [x, np.array(place, np.int64)], {"axis": 1}) for place in (2, -1)]
    found += [OperatorCase("GatherElements", [x, i64([0, 3, 1, 1], [2, 2, 2, 0])], {"axis": 0})]
    found += [OperatorCase("GatherND", [floats(2, 3, 4), i64([[2], [0]], [[1], [1]])], {"batch_dims": 1})]
    places = i64([1, 0], [2, 2], [0, 1])
    found += [OperatorCase("ScatterElements", [floats(3, 3), places, floats(3, 2)], {"axis": 1})]
    found += [OperatorCase("ScatterND", [floats(4, 3, 2), i64([0], [3]), floats(2, 3, 2)])]
    found += [OperatorCase("ScatterND", [floats(4, 3, 2), i64([0, 2], [3, 1]), floats(2, 2)])]
    for axis in (-2, 1):
        past = floats(2, 6, 3, 2) if axis == 1 else floats(2, 3, 6, 2)
        new = floats(2, 2, 3, 2) if axis == 1 else floats(2, 3, 2, 2)
        found += [OperatorCase("TensorScatter", [past, new, i64(0, 4)], {"axis": axis})]
    return found


def _models() -> list[OperatorCase]:
    mask = np.triu(np.full((3, 3), -INF, np.float32), 1)
    query, key, value = floats(2, 4, 3, 8), floats(2, 2, 3, 8), floats(2, 2, 3, 6)
    found = [OperatorCase("Attention", [query, key, value, mask], {"scale": 0.3}, equal=False)]
    found += [OperatorCase("Attention", [query, key, value, mask == 0], equal=False)]
    found += [OperatorCase("Attention", [query, key, value], equal=False)]
    places = i64([0, 1, 2], [5, 6, 7])
    for dim, attributes in ((8, {}), (4, {"rotary_embedding_dim": 4}), (8, {"interleaved": 1})):
        tables = [floats(9, dim // 2), floats(9, dim // 2)]
        heads: dict[str, Any] = {"num_heads": 2, **attributes}
        found += [OperatorCase("RotaryEmbedding", [floats(2, 3, 16), *tables, places], heads, equal=False)]
    return found


def scan_case() -> OperatorCase:
    """A running sum with its steps, scanned along the second axis."""
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "x"], ["sum"]), helper.make_node("Mul", ["sum", "x"], ["step"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("s", "x")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("sum", "step")],
    )
    attributes = {"body": body, "num_scan_inputs": 1, "scan_input_axes": [1], "scan_output_axes": [1]}
    return OperatorCase("Scan", [floats(2), floats(2, 4)], attributes, 2)
