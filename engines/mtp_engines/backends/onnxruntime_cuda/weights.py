"""Weights of sessions: those of a bundle's file as they lie, those of another type in memory."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

_BYTES = 2
"""Of every type that weights are cast to."""


class CastWeights:
    """Values of weights that no file has in their type, one for each name.

    A graph's initializer becomes an external tensor whose values are handed over when its session is opened, so that
    a model does not have to fit in one protocol buffer.
    """

    def __init__(self) -> None:
        self._values: dict[str, ort.OrtValue] = {}
        self._memory: list[object] = []

    def take(self, graph: ir.Graph) -> dict[str, ort.OrtValue]:
        """Values of the cast weights of a graph, which is changed to expect them."""
        taken: dict[str, ort.OrtValue] = {}
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if isinstance(tensor, ir.LazyTensor):
                taken[name] = self._value(name, tensor)
                value.const_value = _placeholder(name, tensor)
        return taken

    def _value(self, name: str, tensor: ir.LazyTensor) -> ort.OrtValue:
        if name not in self._values:
            bits = np.ascontiguousarray(tensor.numpy()).view(np.uint16)
            self._memory.append(bits)
            self._values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, int(tensor.dtype))
        return self._values[name]


def _placeholder(name: str, tensor: ir.LazyTensor) -> ir.ExternalTensor:
    shape = tensor.shape.numpy()
    assert tensor.dtype.itemsize == _BYTES
    # The file is never read; ONNX Runtime replaces the tensor because it is external.
    return ir.ExternalTensor("cast", 0, math.prod(shape) * _BYTES, tensor.dtype, shape=ir.Shape(shape), name=name)
