"""Streams tensors from a checkpoint into the one weight file of a bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir

from mtp_exporter.families.description import Need
from mtp_exporter.quantised import StoredTensor
from mtp_exporter.source import Source

_PAGE = 4096
_SMALL = 1 << 20
_LINE = 64

Progress = Callable[[int], None]
"""Told the number of bytes just written."""


def stored_bytes(need: Need) -> int:
    """Bytes of a need in the weight file: float32, or int64 for ids."""
    return prod(need.shape) * (8 if need.transform == "row_to_id" else 4)


def shared_key(need: Need, tensors: tuple[StoredTensor, ...]) -> object:
    """Equal for roles that have the same values: same places in the same files, same transform."""
    parts = tuple((tensor.file, part) for part, tensor in zip(need.parts, tensors, strict=True))
    return parts, need.transform


class WeightWriter:
    """Appends tensors to a file and gives references into it.

    Never more than one block of a tensor is in memory. A tensor that two roles share is written once.
    """

    def __init__(self, path: Path, source: Source, progress: Progress) -> None:
        self._path, self._source, self._progress = path, source, progress
        self._stream = path.open("wb")
        self._written: dict[object, ir.ExternalTensor] = {}
        self.digests: dict[str, str] = {}
        """Role -> sha256 of its values, for every tensor written so far."""

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, need: Need) -> ir.ExternalTensor:
        """Write the values of a need and return the reference to them.

        Raises:
            CheckpointError: a value is not finite.
        """
        key = shared_key(need, self._source.tensors(need.role))
        if key not in self._written:
            size = stored_bytes(need)
            offset = self._align(_PAGE if size >= _SMALL else _LINE)
            digest = hashlib.sha256()
            for block in self._source.blocks(need.role):
                data = np.ascontiguousarray(block).data
                digest.update(data)
                self._stream.write(data)
                self._progress(block.nbytes)
            self.digests[need.role] = digest.hexdigest()
            self._written[key] = ir.ExternalTensor(
                self._path.name,
                offset,
                size,
                ir.DataType.INT64 if need.transform == "row_to_id" else ir.DataType.FLOAT,
                shape=ir.Shape(need.shape),
                name=need.role,
                base_dir=self._path.parent,
            )
        return self._written[key]

    def _align(self, unit: int) -> int:
        position = self._stream.tell()
        padding = -position % unit
        self._stream.write(b"\0" * padding)
        return position + padding
