"""What TensorRT's builder asks a quickly deployable plugin, in its order, asked by a test.

The objects that the builder would pass, expressions of dimensions, cannot be made from Python; here they are
subclasses that keep what was asked for, so that it can be evaluated. All functions run in a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

CAPABILITY = 89
"""Compute capability that the tests compile for."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A plugin in a network. A dynamic axis is -1 in `shapes` and has its size in `sizes`."""

    plugin: str
    types: Sequence[str]
    shapes: Sequence[Shape]
    sizes: Sequence[Shape]
    attributes: Mapping[str, float | str]


@dataclass(frozen=True)
class Answer:
    """What the plugin answered, at the sizes of the request."""

    output_types: list[str]
    output_shapes: list[Shape]
    aliased: list[int]
    formats: list[tuple[str, str]]
    tactics: list[int]
    kernel: str
    ptx: str
    grid: Shape
    block: Shape
    shared: int
    scalars: list[int]
    fixed: list[bool]
    """Whether each part of the grid is a number already when the engine is built."""


def ask(request: Request) -> Answer:
    """Make the plugin from the registry, strictly ahead of time, and ask it what a builder asks."""
    import tensorrt as trt

    plugin = create(request)
    types = [getattr(trt.DataType, name) for name in request.types]
    output_types = list(plugin.get_output_data_types(types, [len(shape) for shape in request.shapes]))
    dimensions = _dimensions(request)
    builder = _Builder()
    plugin.get_output_shapes(dimensions, [], builder)
    shapes = [tuple(axis._expr.value() for axis in output.shape_expr) for output in plugin.output_descs]
    open_shapes = [tuple(axis._expr.open() for axis in output.shape_expr) for output in plugin.output_descs]
    inputs = [_dynamic(*each) for each in zip(types, request.shapes, request.sizes, strict=True)]
    outputs = [_dynamic(*each) for each in zip(output_types, open_shapes, shapes, strict=True)]
    formats = plugin.get_supported_format_combinations([*inputs, *outputs], len(inputs))
    plugin.configure_plugin(inputs, outputs)
    tactics = plugin.get_valid_tactics()
    plugin.set_tactic(0)
    made = _launch(plugin, dimensions, inputs, outputs, builder)
    kernel, ptx = plugin.get_kernel([each.desc for each in inputs], [each.desc for each in outputs])
    _, _, params, scalars = made
    grid = [getattr(params, f"grid_{axis}")._expr for axis in "xyz"]
    return Answer(
        [each.name for each in output_types],
        shapes,
        [plugin.get_aliased_input(i) for i in range(len(outputs))],
        [(each.type.name, each.format.name) for each in formats],
        tactics,
        kernel,
        ptx.decode(),
        tuple(each.value() for each in grid),
        tuple(getattr(params, f"block_{axis}")._expr.value() for axis in "xyz"),
        params.shared_mem._expr.value(),
        [each._expr.value() for each in scalars],
        [each.is_constant() for each in grid],
    )


def kind_of(request: Request, how: str) -> str:
    """The class of the plugin that the registry creates when asked so."""
    return type(create(request, how)).__name__


def create(request: Request, how: str = "STRICT_AOT") -> Any:
    """The plugin as the parser of ONNX creates it: from the registry, with the node's attributes as fields."""
    import numpy as np
    import tensorrt as trt

    fields = []
    for name, value in request.attributes.items():
        if isinstance(value, str):
            fields.append(trt.PluginField(name, value.encode(), trt.PluginFieldType.CHAR))
        else:
            fields.append(trt.PluginField(name, np.array([value], np.float32), trt.PluginFieldType.FLOAT32))
    creator = trt.get_plugin_registry().get_creator(request.plugin, "1", "mtp")
    assert creator is not None, f"{request.plugin} is not in the registry"
    phase, kind = trt.TensorRTPhase.BUILD, getattr(trt.QuickPluginCreationRequest, how)
    return creator.create_plugin(request.plugin, "mtp", trt.PluginFieldCollection(fields), phase, kind)


def _launch(plugin: Any, dimensions: Any, inputs: list[Any], outputs: list[Any], builder: Any) -> Any:
    """What `aot_impl` returned when TensorRT's own code called it."""
    implement, returned = plugin.aot_impl_function, []

    def watch(*arguments: Any) -> Any:
        returned.append(implement(*arguments))
        return returned[-1]

    plugin.aot_impl_function = watch
    setter = _Setter()
    plugin.get_launch_params(dimensions, [*inputs, *outputs], len(inputs), SimpleNamespace(), setter, builder)
    assert setter.nbSymExprs == len(setter) == len(returned[0][3])
    return returned[0]


class _Setter(dict[int, Any]):
    nbSymExprs = 0  # noqa: N815 - TensorRT's name


def _dimensions(request: Request) -> list[list[Any]]:
    pairs = zip(request.shapes, request.sizes, strict=True)
    return [[_expression(size, known=axis >= 0) for axis, size in zip(*pair, strict=True)] for pair in pairs]


def _dynamic(dtype: Any, shape: Shape, sizes: Shape) -> Any:
    import tensorrt as trt

    found = trt.DynamicPluginTensorDesc()
    found.desc.type, found.desc.format, found.desc.dims = dtype, trt.TensorFormat.LINEAR, shape
    found.min = found.opt = found.max = trt.Dims(sizes)
    return found


def _expression(size: int, *, known: bool) -> Any:
    """An expression of TensorRT that stands for `size`, open until the engine runs unless it is known."""
    import tensorrt as trt

    class Expression(trt.IDimensionExpr):  # type: ignore[misc]
        def is_constant(self) -> bool:
            return known

        def get_constant_value(self) -> int:
            assert known, "a builder does not know this size"
            return size

        def value(self) -> int:
            return size

        def open(self) -> int:
            return size if known else -1

    return Expression.__new__(Expression)  # Its constructor is TensorRT's own affair.


class _Builder:
    """Expressions of expressions, as TensorRT folds them."""

    def constant(self, value: int) -> Any:
        """A number."""
        return _expression(value, known=True)

    def operation(self, operation: Any, a: Any, b: Any) -> Any:
        """One operation on two expressions."""
        rules: dict[str, Callable[[int, int], int]] = {
            "SUM": lambda a, b: a + b,
            "PROD": lambda a, b: a * b,
            "FLOOR_DIV": lambda a, b: a // b,
            "CEIL_DIV": lambda a, b: -(-a // b),
        }
        result = rules[operation.name](a.value(), b.value())
        return _expression(result, known=a.is_constant() and b.is_constant())
