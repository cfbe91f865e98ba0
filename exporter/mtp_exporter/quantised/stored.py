"""What every stored tensor offers to a build, and the one class of the quantised ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mtp_exporter.reading.safetensors_file import TensorInfo

Floats = npt.NDArray[np.float32]
Rows = Callable[[int, int], Floats]
"""Decodes `count` entries of the first axis from `start`."""

_CHUNK = 1 << 20
"""Values that a whole read decodes at a time: unpacking takes several arrays of their size, which fit a cache."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint as float32, however it is stored."""

    @property
    def name(self) -> str:
        """The key that the tensor has in an unquantised checkpoint."""

    @property
    def dtype(self) -> str:
        """The safetensors dtype of a plain tensor, the method and its parameters of a quantised one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the floats, [out, in] for a matrix."""

    @property
    def file(self) -> Path:
        """The file of the main part, for messages."""

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """Every tensor on disk that a read takes, the main one first."""

    def read(self) -> Floats:
        """The whole tensor."""

    def rows(self, start: int, count: int) -> Floats:
        """float32[count, *shape[1:]]: entries of the first axis, without reading the others."""


class UnreadableError(Exception):
    """Why a quantised tensor cannot be decoded: a clause for the message of `Unsupported`, never seen by a user."""


@dataclass(frozen=True)
class QuantisedTensor:
    """A tensor whose values are computed from several on disk."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorInfo, ...]
    _decode: Rows = field(repr=False, compare=False)

    @property
    def file(self) -> Path:
        """The file of the main part."""
        return self.parts[0].file

    def read(self) -> Floats:
        """The whole tensor, decoded a few rows at a time.

        Raises:
            CheckpointError: what is stored contradicts itself, or a file got shorter since its header was read.
        """
        values = np.empty(self.shape, np.float32)
        step = max(1, _CHUNK // max(1, prod(self.shape[1:])))
        for start in range(0, self.shape[0], step):
            count = min(step, self.shape[0] - start)
            values[start : start + count] = self._decode(start, count)
        return values

    def rows(self, start: int, count: int) -> Floats:
        """float32[count, *shape[1:]]: entries of the first axis.

        Raises:
            CheckpointError: as `read`.
            IndexError: the tensor has no such entries.
        """
        # Packed rows lie between others: one too many would be read from the neighbour and not be missed.
        if not 0 <= start <= start + count <= self.shape[0]:
            raise IndexError(f"rows {start} to {start + count} of {self.name!r}, which has {self.shape[0]}")
        return self._decode(start, count)
