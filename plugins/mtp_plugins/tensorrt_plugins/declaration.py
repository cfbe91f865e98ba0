"""What one kernel declares about itself as a plugin: one launch without workspace.

TensorRT passes the addresses of the inputs, integer scalars and the addresses of the outputs, in this order, and
trusts that the kernel takes them so: a wrong order is silent garbage. A declaration therefore checks itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtp_plugins.graph import DOMAIN
from mtp_plugins.tensorrt_plugins.sizes import Size, axes_of
from mtp_plugins.triton_kernels.launch import Launch

VERSION = "1"
"""The only version that TensorRT gives a quickly deployable plugin."""


class PluginError(Exception):
    """A plugin cannot be what its declaration, its kernel or the network asks for."""


@dataclass(frozen=True)
class Alias:
    """An output in the memory of an input."""

    input: str


@dataclass(frozen=True)
class Fixed:
    """What is settled when an engine is built: axes by name, the element type and the node's attributes."""

    sizes: Mapping[str, int]
    element: str
    attributes: Mapping[str, Any]

    @property
    def item_bytes(self) -> int:
        """Size of an element of the type that the kernel computes on."""
        return 4 if self.element == "fp32" else 2


@dataclass(frozen=True)
class Plugin:
    """One kernel as a quickly deployable plugin `mtp::<name>`.

    Axes are named in the shapes of the inputs; equal names are equal sizes. Every constant of the kernel and its
    number of warps come from `launch`, so all axes that it reads must be fixed; grid and scalars may be open.

    Raises:
        PluginError: a name without an axis, a state that is not written in place, or a parameter without a type.
    """

    name: str
    kernel: str
    """Module and function, "mtp_plugins.accept.kernel:accept"."""
    inputs: Mapping[str, Sequence[str]]
    outputs: Mapping[str, tuple[Size, ...] | Alias]
    grid: tuple[Size, Size, Size]
    launch: Callable[[Fixed], Launch]
    types: Callable[[str, Mapping[str, Any]], Mapping[str, str]]
    """Types of the kernel's parameters ("*fp32", "i32", ...) for the type of the `element` input and the attributes."""
    element: str | None = None
    scalars: Mapping[str, Size] = field(default_factory=dict)
    attributes: Mapping[str, type] = field(default_factory=dict)
    """`float` or `str` by name; a node has to have them all."""

    def __post_init__(self) -> None:
        known = {axis for axes in self.inputs.values() for axis in axes}
        shapes = [size for shape in self.outputs.values() if not isinstance(shape, Alias) for size in shape]
        for size in (*shapes, *self.grid, *self.scalars.values()):
            if unknown := axes_of(size) - known:
                self._fail(f"uses the axes {sorted(unknown)}, which no input has")
        types = self._any_types
        for output, shape in self.outputs.items():
            want = output.replace("present_", "past_", 1) if output.startswith("present_") else None
            got = shape.input if isinstance(shape, Alias) else None
            if got != want:
                self._fail(f"has {output} in the memory of {got}; {want} was expected")
            if got is not None and types[self.pointer(output)] != types[self.pointer(got)]:
                self._fail(f"has {output} in the memory of {got}, which is of another type")
        if extra := set(types) - set(self.parameters):
            self._fail(f"has types for {sorted(extra)}, which are neither inputs, scalars nor outputs")
        if wrong := [name for name in self.scalars if types.get(name) != "i32"]:
            self._fail(f"has the scalars {wrong}, which are no 32-bit integers")
        if len(self.attributes) > 1:
            # TensorRT passes the values without names, in the order in which the node has them.
            self._fail(f"has the attributes {', '.join(self.attributes)}; one at most was expected")

    @property
    def _any_types(self) -> Mapping[str, str]:
        # Whatever the types are, they have the same names.
        return self.types("fp32", dict.fromkeys(self.attributes, "fp32"))

    @property
    def identifier(self) -> str:
        """Namespace and name, as TensorRT takes them."""
        return f"{DOMAIN}::{self.name}"

    @property
    def parameters(self) -> list[str]:
        """The kernel's parameters in the order in which TensorRT passes them, before the constants."""
        inputs, outputs = ([self.pointer(name) for name in group] for group in (self.inputs, self.outputs))
        return [*inputs, *self.scalars, *outputs]

    def pointer(self, name: str) -> str:
        """The kernel's parameter for an input or output."""
        found = [key for key in (f"{name}_ptr", name) if key in self._any_types]
        if not found:
            self._fail(f"has no type for {name}")
        return found[0]

    def signature(self, element: str, attributes: Mapping[str, Any]) -> dict[str, str]:
        """Types of all parameters before the constants, in order."""
        types = self.types(element, attributes)
        return {name: types[name] for name in self.parameters}

    def check_kernel(self, names: Sequence[str], constants: Mapping[str, Any]) -> None:
        """Compare with the kernel's parameters; raises PluginError if TensorRT would pass others."""
        want = [*self.parameters, *constants]
        if list(names[: len(self.parameters)]) != self.parameters or set(names) != set(want):
            self._fail(f"passes {', '.join(want)}; its kernel takes {', '.join(names)}")

    def _fail(self, what: str) -> None:
        raise PluginError(f"The plugin {self.identifier} {what}. Correct its declaration, or the network that uses it.")
