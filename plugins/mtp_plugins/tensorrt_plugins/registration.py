"""Declarations as quickly deployable plugins of TensorRT, ahead-of-time form: their kernels are PTX in the engine.

A process registers once and then parses graphs; what it asks for is compiled when an engine is built.
"""

# tensorrt has no types, and a default installation does not have it; it is imported where plugins are registered.

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_plugins.tensorrt_plugins.declaration import Alias, Fixed, Plugin, PluginError
from mtp_plugins.tensorrt_plugins.registry import PLUGINS
from mtp_plugins.tensorrt_plugins.sizes import evaluate
from mtp_plugins.triton_kernels.launch import Launch
from mtp_plugins.triton_kernels.ptx import compile_ptx

ELEMENTS = ("fp32", "fp16", "bf16")
"""Types that the kernels compute on."""
_NAMES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "i32": "INT32", "i64": "INT64"}
"""TensorRT's name of each element type of a kernel."""
# An array: a plain float is turned by TensorRT 10.16 into one in a way that NumPy no longer has.
_ANNOTATIONS = {float: npt.NDArray[np.float32], str: str}


def register_all(capability: int, cache: Path | None = None) -> None:
    """Make every plugin known to TensorRT's registry; see `register`."""
    register(PLUGINS.values(), capability, cache)


def register(plugins: Iterable[Plugin], capability: int, cache: Path | None = None) -> None:
    """Make plugins known to TensorRT's registry, compiled for GPUs of one compute capability (major * 10 + minor).

    Called again, with another capability too, it replaces how kernels are compiled. The kernels' PTX is kept in
    `cache` and taken from it.
    """
    import tensorrt.plugin as trtp

    for plugin in plugins:
        namespace, name = plugin.identifier.split("::")
        if not hasattr(trtp.op, namespace) or not hasattr(getattr(trtp.op, namespace), name):
            trtp.register(plugin.identifier)(_description(plugin))
        trtp.autotune(plugin.identifier)(_formats(plugin))
        trtp.aot_impl(plugin.identifier)(_implementation(plugin, capability, cache))


def _description(plugin: Plugin) -> Callable[..., Any]:
    """What TensorRT asks for the types and shapes of the outputs."""
    import tensorrt.plugin as trtp

    def describe(*inputs: Any, **attributes: Any) -> tuple[Any, ...]:
        if set(attributes) != set(plugin.attributes):
            raise PluginError(
                f"{plugin.identifier} got the attributes {sorted(attributes)}; {sorted(plugin.attributes)} were "
                "expected. Correct the node."
            )
        tensors = dict(zip(plugin.inputs, inputs, strict=True))
        signature = plugin.signature(_element(plugin, tensors), attributes)
        _check_types(plugin, tensors, signature)
        axes, symbols = _axes(plugin, tensors), _Symbols()
        results = []
        for name, shape in plugin.outputs.items():
            if isinstance(shape, Alias):
                results.append(tensors[shape.input].aliased())
            else:
                sizes = tuple(evaluate(size, axes, symbols) for size in shape)
                results.append(trtp.from_shape_expr(sizes, _dtype(signature[plugin.pointer(name)])))
        return tuple(results)

    return _signed(describe, plugin, {}, _tuple_of(plugin))


def _formats(plugin: Plugin) -> Callable[..., Any]:
    """What TensorRT asks for types and layouts: those of the network, and rows without gaps."""
    import tensorrt.plugin as trtp

    def formats(*arguments: Any) -> list[Any]:
        tensors, attributes, _ = _split(plugin, arguments)
        signature = plugin.signature(_element(plugin, tensors), attributes)
        pointers = [plugin.pointer(name) for name in (*plugin.inputs, *plugin.outputs)]
        return [trtp.AutoTuneCombination(", ".join(_string(signature[name]) for name in pointers), "LINEAR")]

    return _signed(formats, plugin, {"outputs": _tuple_of(plugin)}, list[trtp.AutoTuneCombination])


def _implementation(plugin: Plugin, capability: int, cache: Path | None) -> Callable[..., Any]:
    """What TensorRT asks for the kernel, its launch and the scalars between inputs and outputs."""
    import tensorrt.plugin as trtp

    def implement(*arguments: Any) -> tuple[str, str, Any, Any]:
        tensors, attributes, (outputs, _) = _split(plugin, arguments)
        element = _element(plugin, tensors)
        signature = plugin.signature(element, attributes)
        _check_types(plugin, tensors | dict(zip(plugin.outputs, outputs, strict=True)), signature)
        axes, symbols = _axes(plugin, tensors), _Symbols()
        launch = _launch(plugin, axes, element, attributes)
        module, name = plugin.kernel.split(":")
        kernel = getattr(importlib.import_module(module), name)
        plugin.check_kernel(kernel.arg_names, launch.constexprs)
        warps, stages = launch.num_warps, launch.num_stages
        ptx = compile_ptx(kernel, signature, launch.constexprs, capability, warps, num_stages=stages, directory=cache)
        x, y, z = (evaluate(size, axes, symbols) for size in plugin.grid)
        params = trtp.KernelLaunchParams(grid_x=x, grid_y=y, grid_z=z, block_x=32 * warps, shared_mem=ptx.shared)
        scalars = trtp.SymIntExprs(len(plugin.scalars))
        for i, size in enumerate(plugin.scalars.values()):
            scalars[i] = trtp.SymInt32(evaluate(size, axes, symbols))
        return ptx.entry, ptx.text, params, scalars

    extra = {"outputs": _tuple_of(plugin), "tactic": int}
    returned = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    return _signed(implement, plugin, extra, returned)


def _signed(
    function: Callable[..., Any], plugin: Plugin, extra: Mapping[str, Any], returned: Any
) -> Callable[..., Any]:
    """The function with named and annotated parameters, which TensorRT reads off its signature."""
    import tensorrt.plugin as trtp

    annotations = dict.fromkeys(plugin.inputs, trtp.TensorDesc)
    annotations |= {name: _ANNOTATIONS[kind] for name, kind in plugin.attributes.items()} | dict(extra)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in annotations.items()]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return function


def _tuple_of(plugin: Plugin) -> Any:
    """The type of all outputs together."""
    import tensorrt.plugin as trtp

    return types.GenericAlias(tuple, (trtp.TensorDesc,) * len(plugin.outputs))


def _split(plugin: Plugin, arguments: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any], Sequence[Any]]:
    """Inputs and attributes by name, and what stands behind them."""
    inputs, end = len(plugin.inputs), len(plugin.inputs) + len(plugin.attributes)
    tensors = dict(zip(plugin.inputs, arguments[:inputs], strict=True))
    return tensors, dict(zip(plugin.attributes, arguments[inputs:end], strict=True)), arguments[end:]


def _element(plugin: Plugin, tensors: Mapping[str, Any]) -> str:
    """The element type that chooses the kernel's types."""
    if plugin.element is None:
        return "fp32"  # No input decides about the kernel's types.
    found = tensors[plugin.element].dtype
    for name in ELEMENTS:
        if _dtype(name) == found:
            return name
    raise PluginError(
        f"{plugin.identifier} got {plugin.element} of type {found}; {', '.join(ELEMENTS)} were expected. Correct the "
        "network."
    )


def _axes(plugin: Plugin, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """TensorRT's expression for each axis, a constant one if any input has it constant."""
    axes: dict[str, Any] = {}
    for name, names in plugin.inputs.items():
        expressions = tensors[name].shape_expr
        if len(expressions) != len(names):
            raise PluginError(
                f"{plugin.identifier} got {name} of {len(expressions)} axes; {len(names)} were expected: "
                f"{', '.join(names)}. Correct the network."
            )
        for axis, expression in zip(names, expressions, strict=True):
            before = axes.setdefault(axis, expression)
            if not _is_constant(expression):
                continue
            if _is_constant(before) and before.constant_value() != expression.constant_value():
                raise PluginError(
                    f"{plugin.identifier} got {expression.constant_value()} as {axis} of {name}, and "
                    f"{before.constant_value()} from an input before it. Correct the network."
                )
            axes[axis] = expression
    return axes


def _is_constant(expression: Any) -> bool:
    # TensorRT asks for types before it has shapes; then no expression can be looked at.
    return not expression.is_fake and bool(expression.is_constant)


def _launch(plugin: Plugin, axes: Mapping[str, Any], element: str, attributes: Mapping[str, Any]) -> Launch:
    sizes = {name: int(axis.constant_value()) for name, axis in axes.items() if _is_constant(axis)}
    values = {
        name: float(value.item()) if plugin.attributes[name] is float else str(value)
        for name, value in attributes.items()
    }
    try:
        return plugin.launch(Fixed(sizes, element, values))
    except KeyError as error:
        raise PluginError(
            f"{plugin.identifier} compiles its kernel for a fixed {error.args[0]}, which the network leaves open. "
            "Give that axis a number in the graph."
        ) from error


def _check_types(plugin: Plugin, tensors: Mapping[str, Any], signature: Mapping[str, str]) -> None:
    for name, tensor in tensors.items():
        want = signature[plugin.pointer(name)]
        if tensor.dtype != _dtype(want):
            raise PluginError(
                f"{plugin.identifier} got {name} of type {tensor.dtype}; {want[1:]} was expected. Correct the network."
            )


def _dtype(kind: str) -> Any:
    """TensorRT's type of an element or of what a pointer points to."""
    import tensorrt as trt

    return getattr(trt.DataType, _NAMES[kind.removeprefix("*")])


def _string(kind: str) -> str:
    """How a format combination spells a type."""
    return {"*fp32": "FP32", "*fp16": "FP16"}.get(kind, _NAMES[kind.removeprefix("*")])


class _Symbols:
    """Arithmetic of TensorRT's expressions; numbers among themselves stay numbers."""

    def times(self, a: Any, b: Any) -> Any:
        """a * b."""
        return a * b if isinstance(a, int) == isinstance(b, int) else self._symbol(a) * b

    def floor(self, a: Any, b: Any) -> Any:
        """a // b."""
        return a // b if isinstance(a, int) == isinstance(b, int) else self._symbol(a) // b

    def ceil(self, a: Any, b: Any) -> Any:
        """a / b, rounded up."""
        import tensorrt.plugin as trtp

        return -(-a // b) if isinstance(a, int) and isinstance(b, int) else trtp.cdiv(a, b)

    def _symbol(self, a: Any) -> Any:
        import tensorrt.plugin as trtp

        return trtp.ShapeExpr(a)
