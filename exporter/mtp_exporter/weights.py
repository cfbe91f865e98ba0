"""Streams tensors from a checkpoint into the one weight file of a bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.errors import CheckpointError
from mtp_exporter.families.description import Need
from mtp_exporter.safetensors_file import TensorInfo

_PAGE = 4096
_SMALL = 1 << 20
_LINE = 64

Progress = Callable[[int], None]
"""Told the number of checkpoint bytes just read."""


class WeightWriter:
    """Appends tensors to a file and gives references into it.

    Never more than one block of a tensor is in memory. A tensor that two roles share is written once.
    """

    def __init__(self, path: Path, progress: Progress) -> None:
        self._path, self._progress = path, progress
        self._stream = path.open("wb")
        self._written: dict[tuple[str, str], ir.ExternalTensor] = {}
        self.digests: dict[str, str] = {}
        """Checkpoint key -> sha256 of its bytes, for every tensor written so far."""

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def add(self, need: Need, tensor: TensorInfo) -> ir.ExternalTensor:
        """Write a tensor as float32 and return the reference to it.

        Raises:
            CheckpointError: the tensor holds a value that is not finite.
        """
        key = (need.key, need.transform)
        if key not in self._written:
            size = prod(need.shape) * 4
            offset = self._align(_PAGE if size >= _SMALL else _LINE)
            digest = hashlib.sha256()
            for raw in tensor.raw_blocks():
                digest.update(raw)
                self._stream.write(np.ascontiguousarray(self._converted(tensor.floats(raw), need, tensor)).data)
                self._progress(len(raw))
            self.digests[need.key] = digest.hexdigest()
            self._written[key] = ir.ExternalTensor(
                self._path.name,
                offset,
                size,
                ir.DataType.FLOAT,
                shape=ir.Shape(need.shape),
                name=need.role,
                base_dir=self._path.parent,
            )
        return self._written[key]

    def _converted(self, block: npt.NDArray[np.float32], need: Need, tensor: TensorInfo) -> npt.NDArray[np.float32]:
        if not np.isfinite(block).all():
            raise CheckpointError(
                f"Tensor {tensor.name!r} in {tensor.file} holds NaN or infinity. Mend the checkpoint or fetch the file "
                "again."
            )
        return block if need.transform == "none" else np.float32(1) + block

    def _align(self, unit: int) -> int:
        position = self._stream.tell()
        padding = -position % unit
        self._stream.write(b"\0" * padding)
        return position + padding
