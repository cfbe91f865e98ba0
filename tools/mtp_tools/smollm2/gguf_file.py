"""Reading a GGUF file: its metadata, and its tensors as float32 a few rows at a time."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_tools.smollm2.wheel import ModelError

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class GgufTensor:
    """A stored tensor; `shape` is in elements, outermost axis first, as NumPy and safetensors order it."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """Name of the quantisation, such as Q4_1."""
    _raw: npt.NDArray[Any] = field(repr=False)
    _kind: Any = field(repr=False)

    def rows(self, start: int, count: int) -> Floats:
        """float32[count, ...]: entries of the first axis, dequantised."""
        values = _gguf().quants.dequantize(self._raw[start : start + count], self._kind)
        return np.asarray(values, np.float32)


@dataclass(frozen=True)
class GgufFile:
    """An open GGUF file; tensor data stays on disk until it is asked for."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


def open_gguf(path: Path) -> GgufFile:
    """Read the metadata and find the tensors.

    Raises:
        ModelError: the package that reads GGUF is not installed, or the file is no GGUF file.
    """
    try:
        reader = _gguf().GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} cannot be read as a GGUF file: {error}; fetch it again.") from error
    metadata = {name: part.contents() for name, part in reader.fields.items()}
    tensors = tuple(
        # GGUF writes the innermost axis first.
        GgufTensor(t.name, tuple(map(int, reversed(t.shape))), t.tensor_type.name, t.data, t.tensor_type)
        for t in reader.tensors
    )
    return GgufFile(metadata, tensors)


def _gguf() -> Any:
    """The package `gguf`, imported late, since nothing else in this repository needs it."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise ModelError(
            "Reading a GGUF file needs the package gguf; install it with `pip install 'mtp-export[smollm2]'`."
        ) from error
