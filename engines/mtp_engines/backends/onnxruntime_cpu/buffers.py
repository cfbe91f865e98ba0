"""Arrays that a session reads and writes in place, bound once and reused every cycle."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from mtp_engines.contracts.model import FLOAT_BYTES

AnyArray = npt.NDArray[Any]
_ALIGNMENT = 64
"""What kernels want that write past the caches."""
_MAPPED_BYTES = 256 << 10


class Bound:
    """One session with all its inputs and outputs bound to arrays of the caller.

    The arrays are shared with ONNX Runtime, not copied: write the inputs, call `run`, read the outputs.
    """

    def __init__(
        self, session: ort.InferenceSession, inputs: Mapping[str, AnyArray], outputs: Mapping[str, AnyArray]
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._values: list[ort.OrtValue] = []
        for name, array in inputs.items():
            self._binding.bind_ortvalue_input(name, self._share(array))
        for name, array in outputs.items():
            self._binding.bind_ortvalue_output(name, self._share(array))

    def run(self) -> None:
        """Run the session over the bound arrays."""
        self._session.run_with_iobinding(self._binding)

    def _share(self, array: AnyArray) -> ort.OrtValue:
        assert array.flags.c_contiguous, "ONNX Runtime shares contiguous memory only"
        value = ort.OrtValue.ortvalue_from_numpy(array)
        assert array.size == 0 or value.data_ptr() == array.ctypes.data, "ONNX Runtime copied an array it should share"
        self._values.append(value)
        return value


def zeros(*shape: int) -> npt.NDArray[np.float32]:
    """float32 zeros at an address that is a multiple of 64 bytes; untouched pages cost no memory.

    Large ones are mappings of their own, which go back to the system when they are freed: malloc would keep them, and
    what later requests allocate would lie beside the holes.
    """
    size = FLOAT_BYTES * math.prod(shape)
    if size >= _MAPPED_BYTES:
        # Private: Python's default is shared with every process that is forked.
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(mapping, np.float32).reshape(shape)
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    aligned: npt.NDArray[np.float32] = memory[start : start + size].view(np.float32).reshape(shape)
    return aligned
