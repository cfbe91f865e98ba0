"""Sizes as expressions over the axes of a plugin's inputs, evaluated to numbers or to TensorRT's own expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Arithmetic(Protocol):
    """What expressions are made of, on whatever stands for a size."""

    def times(self, a: Any, b: Any) -> Any:
        """a * b."""

    def floor(self, a: Any, b: Any) -> Any:
        """a // b."""

    def ceil(self, a: Any, b: Any) -> Any:
        """a / b, rounded up."""


class Size:
    """An expression; a product and a quotient of sizes are sizes."""

    def __mul__(self, other: Size | int) -> Size:
        return _Term("times", self, number(other))

    def __floordiv__(self, other: Size | int) -> Size:
        return _Term("floor", self, number(other))


@dataclass(frozen=True)
class _Number(Size):
    value: int


@dataclass(frozen=True)
class _Axis(Size):
    name: str


@dataclass(frozen=True)
class _Term(Size):
    operation: str
    left: Size
    right: Size


def number(value: Size | int) -> Size:
    """A constant as an expression; an expression as it is."""
    return _Number(value) if isinstance(value, int) else value


def axis(name: str) -> Size:
    """The size of a named axis."""
    return _Axis(name)


def ceil(a: Size, b: Size | int) -> Size:
    """a / b, rounded up."""
    return _Term("ceil", a, number(b))


def evaluate(size: Size, axes: Mapping[str, Any], arithmetic: Arithmetic) -> Any:
    """The value of an expression; raises KeyError for an axis that `axes` does not have."""
    if isinstance(size, _Number):
        return size.value
    if isinstance(size, _Axis):
        return axes[size.name]
    assert isinstance(size, _Term)
    operands = [evaluate(operand, axes, arithmetic) for operand in (size.left, size.right)]
    return getattr(arithmetic, size.operation)(*operands)


def axes_of(size: Size) -> set[str]:
    """Names of the axes in an expression."""
    if isinstance(size, _Axis):
        return {size.name}
    return axes_of(size.left) | axes_of(size.right) if isinstance(size, _Term) else set()
