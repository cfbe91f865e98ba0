"""Runs an ONNX graph node by node with PyTorch.

No library is used for this: those that turn ONNX into PyTorch do not know opset 24 or functions of a model. Shapes
stay on the host, so a run on a device never waits for it and can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from mtp_engines.backends.torch import arithmetic, layout  # noqa: F401 - they fill the table of operators
from mtp_engines.backends.torch.call import ATTRIBUTES, MOST_INPUTS, OPERATORS, Call, Tensor, Values
from mtp_engines.backends.torch.tensors import tensor_of
from mtp_engines.errors import BundleError
from mtp_plugins.graph import DOMAIN
from mtp_plugins.registry import OPERATORS as PLUGINS

Kernel = Callable[[Call], Values]
_HOST_INPUTS = {
    "Reshape": {1},
    "Unsqueeze": {1},
    "Squeeze": {1},
    "Expand": {1},
    "Split": {1},
    "Slice": {1, 2, 3, 4},
    "Pad": {1, 3},
    "Range": {0, 1, 2},
    "TopK": {1},
    "ReduceSum": {1},
    "ReduceMax": {1},
    "ReduceMin": {1},
    "CumSum": {1},
}
"""Inputs that say how, and are read on the host; the others go to the device of the graph."""


@dataclass(frozen=True)
class _Step:
    node: ir.Node
    inputs: tuple[ir.Value | None, ...]
    outputs: tuple[ir.Value, ...]
    attributes: dict[str, Any]
    references: dict[str, str]
    """Attributes that a function takes from its caller: own name to the caller's."""
    finished: tuple[ir.Value, ...]
    """Values that no later step reads."""


class Interpreter:
    """A graph ready to run.

    Args:
        model: weights as constants of its initializers.
        device: where it runs.
        kernels: what runs a custom operator, by name; the others run by their bodies.
        shared: weights on the device by name, which graphs of one bundle have in common; filled here.
    """

    def __init__(
        self,
        model: ir.Model,
        device: torch.device,
        kernels: Mapping[str, Kernel] | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> None:
        shared = {} if shared is None else shared
        self._device, self._kernels = device, dict(kernels or {})
        self._weights: dict[ir.Value, Tensor] = {}
        self._device_copies: dict[int, tuple[Tensor, Tensor]] = {}
        graph = model.graph
        self.inputs = {str(value.name): value for value in graph.inputs}
        self.outputs = {str(value.name): value for value in graph.outputs}
        self._steps = _steps(graph, self._weights)
        self._bodies: dict[str, tuple[ir.Function, list[_Step]]] = {}
        self._subgraphs: dict[ir.Graph, list[_Step]] = {}
        for name, value in graph.initializers.items():
            if name not in shared:
                assert value.const_value is not None
                shared[name] = tensor_of(value.const_value).to(device)
            self._weights[value] = shared[name]

    def run(self, feeds: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        """Run the graph.

        Args:
            feeds: every input that the graph has, by name; others are left alone.
            into: buffers of the outputs, by name; a state's may be that of the input it replaces.
        """
        values: dict[ir.Value, Tensor] = {self.inputs[name]: x for name, x in feeds.items() if name in self.inputs}
        buffers = {self.outputs[name]: buffer for name, buffer in into.items()}
        self._run(self._steps, values, {}, buffers)
        for value, buffer in buffers.items():
            if values[value] is not buffer:
                buffer.copy_(values[value])

    def _run(
        self,
        steps: Iterable[_Step],
        values: dict[ir.Value, Tensor],
        attributes: Mapping[str, Any],
        buffers: Mapping[ir.Value, Tensor],
    ) -> None:
        for step in steps:
            given = {own: attributes[theirs] for own, theirs in step.references.items() if theirs in attributes}
            call = Call(
                [None if value is None else self._value(value, values, step, i) for i, value in enumerate(step.inputs)],
                step.attributes | given,
                len(step.outputs),
                self._device,
                self._subgraph(step, values),
                {place: buffers[value] for place, value in enumerate(step.outputs) if value in buffers},
            )
            for value, result in zip(step.outputs, self._call(step.node, call), strict=True):
                values[value] = result
            for value in step.finished:
                values.pop(value, None)

    def _call(self, node: ir.Node, call: Call) -> Values:
        if node.domain != DOMAIN:
            return OPERATORS[node.op_type](call)
        if node.op_type in self._kernels:
            return self._kernels[node.op_type](call)
        if node.op_type not in self._bodies:
            function = PLUGINS[node.op_type].function()
            self._bodies[node.op_type] = function, _steps(function, self._weights)
        function, steps = self._bodies[node.op_type]
        given = zip(function.inputs, call.inputs, strict=True)
        values = {own: value for own, value in given if value is not None}
        self._run(steps, values, call.attributes, {})
        return [values[value] for value in function.outputs]

    def _subgraph(
        self, step: _Step, outer: dict[ir.Value, Tensor]
    ) -> Callable[[Sequence[Tensor]], list[Tensor]] | None:
        body = step.attributes.get("body")
        if body is None:
            return None
        if body not in self._subgraphs:
            self._subgraphs[body] = _steps(body, self._weights)

        def run(inputs: Sequence[Tensor]) -> list[Tensor]:
            values = outer | dict(zip(body.inputs, inputs, strict=True))
            self._run(self._subgraphs[body], values, {}, {})
            return [values[value] for value in body.outputs]

        return run

    def _value(self, value: ir.Value, values: Mapping[ir.Value, Tensor], step: _Step, place: int) -> Tensor:
        found = values[value] if value in values else self._weights[value]
        on_host = place in _HOST_INPUTS.get(step.node.op_type, ())
        # A number without axes goes along with tensors of any device.
        if on_host or found.device == self._device or found.ndim == 0 or step.node.op_type == "Shape":
            return found
        if value not in self._weights:
            return found.to(self._device)
        # Constants are moved once, since a copy from the host cannot be captured.
        key = id(value)
        if key not in self._device_copies:
            self._device_copies[key] = found, found.to(self._device)
        return self._device_copies[key][1]


def _steps(graph: ir.Graph | ir.Function, weights: dict[ir.Value, Tensor]) -> list[_Step]:
    """The nodes in order; constants become weights."""
    nodes = []
    for node in graph:
        if node.op_type == "Constant" and not node.domain:
            weights[node.outputs[0]] = tensor_of(node.attributes["value"].as_tensor())
        else:
            nodes.append(node)
    last: dict[ir.Value, int] = {}
    for index, node in enumerate(nodes):
        # The body of a loop reads values around it too.
        bodies = [a.as_graph() for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH and not a.is_ref()]
        inner = [value for body in bodies for each in body for value in each.inputs]
        last.update({value: index for value in (*node.inputs, *node.outputs, *inner) if value is not None})
    ends: dict[int, list[ir.Value]] = {}
    for value, index in last.items():
        if value not in graph.outputs:
            ends.setdefault(index, []).append(value)
    return [_step(node, tuple(ends.get(index, ()))) for index, node in enumerate(nodes)]


def _step(node: ir.Node, finished: tuple[ir.Value, ...]) -> _Step:
    if not node.domain:
        _refuse_unknown(node)
    attributes, references = {}, {}
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            references[name] = str(attribute.ref_attr_name)
        else:
            attributes[name] = list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value
    return _Step(node, tuple(node.inputs), tuple(node.outputs), attributes, references, finished)


def _refuse_unknown(node: ir.Node) -> None:
    """Refuse what would be left out of account, before anything runs."""
    known = node.op_type in OPERATORS
    found = sorted(set(node.attributes) - ATTRIBUTES[node.op_type]) if known else []
    most = MOST_INPUTS.get(node.op_type, len(node.inputs))
    extra = [str(value.name) for value in node.inputs[most:] if value is not None]
    if not known or found or extra:
        what = f"{node.op_type} with {', '.join([*found, *extra])}" if known else node.op_type
        raise BundleError(f"The torch backend has no operator {what}. Run the bundle with --backend onnxruntime.")
