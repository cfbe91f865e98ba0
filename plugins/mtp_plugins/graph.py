"""A thin builder over onnx_ir: named nodes, scopes, deduplicated constants, graph inputs and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

OPSET = 24
IR_VERSION = 11
DOMAIN = "mtp"
"""Domain of the canonical graph's custom operators."""
CONTRIB = "com.microsoft"
"""Domain of the operators that only ONNX Runtime has."""

type_of = {"float32": ir.DataType.FLOAT, "int64": ir.DataType.INT64, "int32": ir.DataType.INT32}

Axis = int | str
AttributeValue = int | float | str | Sequence[int] | ir.TensorProtocol | ir.Graph


class GraphBuilder:
    """Collects the nodes of one graph in order.

    Every node and value gets a name below the current scope, so that an error of a runtime names the layer.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._scope: list[str] = []
        self._used: dict[str, int] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self.nodes: list[ir.Node] = []
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self.initializers: dict[str, ir.Value] = {}

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of everything added inside with `name.`."""
        self._scope.append(name)
        try:
            yield
        finally:
            self._scope.pop()

    def input(self, name: str, dtype: str, shape: Sequence[Axis]) -> ir.Value:
        """Add a graph input; a string axis is symbolic."""
        value = ir.Value(name=name, type=ir.TensorType(type_of[dtype]), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, dtype: str, shape: Sequence[Axis]) -> None:
        """Make `value` a graph output under a fixed name."""
        if value.producer() is None or value in self.outputs or value.shape is not None:
            value = self.op("Identity", value)  # It has a name already.
        self.label(name, value, dtype, shape)
        self.outputs.append(value)

    def label(self, name: str, value: ir.Value, dtype: str, shape: Sequence[Axis]) -> None:
        """Give a value a name, type and shape by which tools find it and can cut the graph there."""
        value.name = name
        value.type = ir.TensorType(type_of[dtype])
        value.shape = ir.Shape(shape)

    def initializer(self, name: str, tensor: ir.ExternalTensor) -> ir.Value:
        """A weight; the same name gives the same value again."""
        if name not in self.initializers:
            self.initializers[name] = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
            )
        return self.initializers[name]

    def constant(self, array: npt.ArrayLike, dtype: str = "int64") -> ir.Value:
        """A small constant inside the graph; equal constants share one node."""
        value = np.ascontiguousarray(np.asarray(array, dtype=dtype)).reshape(np.shape(array))
        key = (str(value.dtype), value.shape, value.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=ir.tensor(value))
        return self._constants[key]

    def op(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: AttributeValue) -> ir.Value:
        """Add a node with one output and return that output."""
        return self.op_multi(op_type, *inputs, outputs=("",), domain=domain, **attributes)[0]

    def op_multi(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        outputs: Sequence[str],
        domain: str = "",
        **attributes: AttributeValue,
    ) -> list[ir.Value]:
        """Add a node with one output for each name in `outputs` ("" for the node's own name)."""
        name = self._unique(".".join([*self._scope, op_type]))
        values = [ir.Value(name=f"{name}.{suffix}" if suffix else name) for suffix in outputs]
        node = ir.Node(
            domain,
            op_type,
            inputs,
            ir.convenience.convert_attributes(attributes),
            outputs=values,
            name=name,
        )
        self.nodes.append(node)
        return values

    def graph(self, opset_imports: Mapping[str, int] | None = None) -> ir.Graph:
        """The graph built so far; the builder is used up."""
        return ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports=dict(opset_imports or {}),
            name=self._name,
        )

    def model(self, functions: Sequence[ir.Function] = (), domains: Sequence[str] = ()) -> ir.Model:
        """The graph as a model, with the functions that give the custom operators a body."""
        imports = {"": OPSET} | dict.fromkeys(domains, 1)
        return ir.Model(self.graph(imports), ir_version=IR_VERSION, functions=functions, producer_name="mtp-export")

    def _unique(self, name: str) -> str:
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return f"{name}_{count}" if count else name
