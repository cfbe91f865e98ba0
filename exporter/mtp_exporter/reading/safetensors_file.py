"""Headers and raw rows of one safetensors file.

The safetensors library gives whole tensors but no offsets, and NumPy has no bfloat16 of its own; a
build streams raw bytes, so the header (eight bytes of length, then JSON) is read here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mtp_engines.errors import CheckpointError

FLOAT_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_MAX_HEADER = 100_000_000
_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `dtype` is the safetensors name; offset and size are bytes in the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def blocks(self) -> Iterator[npt.NDArray[np.float32]]:
        """The tensor as float32, flattened, in blocks of at most 64 MiB.

        Raises:
            CheckpointError: the dtype is not a plain float, or the file got shorter since its header was read.
        """
        for raw in self.raw_blocks():
            yield self.floats(raw)

    def raw_blocks(self) -> Iterator[bytes]:
        """The bytes of the tensor in blocks of at most 32 MiB.

        Raises:
            CheckpointError: the file got shorter since its header was read.
        """
        with self.file.open("rb") as stream:
            stream.seek(self.offset)
            left = self.size
            while left:
                raw = stream.read(min(left, _BLOCK_BYTES))
                if not raw:
                    raise CheckpointError(f"{self.file} ended inside tensor {self.name!r}; fetch the file again.")
                left -= len(raw)
                yield raw

    def floats(self, raw: bytes) -> npt.NDArray[np.float32]:
        """One raw block as float32.

        Raises:
            CheckpointError: the dtype is not a plain float.
        """
        dtype = FLOAT_TYPES.get(self.dtype)
        if dtype is None:
            raise CheckpointError(
                f"Tensor {self.name!r} in {self.file} has dtype {self.dtype}, expected one of "
                f"{', '.join(FLOAT_TYPES)}. Use the unquantised checkpoint."
            )
        return np.frombuffer(raw, dtype).astype(np.float32)

    def digest(self) -> str:
        """sha256 of all bytes of the tensor."""
        state = hashlib.sha256()
        for raw in self.raw_blocks():
            state.update(raw)
        return state.hexdigest()

    def read(self) -> npt.NDArray[np.float32]:
        """The whole tensor as float32."""
        whole, position = np.empty(prod(self.shape), np.float32), 0
        for block in self.blocks():
            whole[position : position + len(block)] = block
            position += len(block)
        return whole.reshape(self.shape)

    def read_integers(self) -> npt.NDArray[np.int64]:
        """The whole tensor as int64.

        Raises:
            CheckpointError: the dtype is no whole number.
        """
        dtype = {"I64": np.int64, "I32": np.int32}.get(self.dtype)
        if dtype is None:
            raise CheckpointError(
                f"Tensor {self.name!r} in {self.file} has dtype {self.dtype}, expected I64 or I32. Fetch "
                "the file again."
            )
        return np.frombuffer(b"".join(self.raw_blocks()), dtype).astype(np.int64).reshape(self.shape)

    @property
    def parts(self) -> tuple[TensorInfo, ...]:
        """Every tensor on disk that it reads: itself."""
        return (self,)

    def rows(self, start: int, count: int) -> npt.NDArray[np.float32]:
        """`count` entries of the first axis from `start`, as float32."""
        width = self.size // max(self.shape[0], 1)
        part = replace(self, shape=(count, *self.shape[1:]), offset=self.offset + start * width, size=count * width)
        return part.read()


def read_header(file: Path) -> dict[str, TensorInfo]:
    """All tensors that a safetensors file declares.

    Raises:
        CheckpointError: the file is missing, cut short, has bytes too many, or is not safetensors at all.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(
                f"{file} is cut short: it has {size} bytes, a safetensors file has at least 8. Fetch the file again."
            )
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(_not_safetensors(file, size))
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(_not_safetensors(file, size)) from error
    if not isinstance(header, dict):
        raise CheckpointError(_not_safetensors(file, size))
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    expected = 8 + length + max((t.offset + t.size - 8 - length for t in tensors.values()), default=0)
    if size != expected:
        kind = "cut short" if size < expected else "longer than its header says"
        raise CheckpointError(
            f"{file} is {kind}: it has {size} bytes, its header describes {expected}. Fetch the file again."
        )
    return tensors


def _tensor(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(axis) for axis in entry["shape"])
        start, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a valid safetensors file: the header entry of {name!r} is {entry!r}, expected dtype, "
            "shape and data_offsets. Fetch the file again."
        ) from error
    wide = prod(shape) * _WIDTHS.get(dtype, 1)
    if dtype in _WIDTHS and end - start != wide:
        raise CheckpointError(
            f"{file} is damaged: tensor {name!r} has {end - start} bytes, its shape {list(shape)} and dtype {dtype} "
            f"need {wide}. Fetch the file again."
        )
    return TensorInfo(name, file, dtype, shape, base + start, end - start)


def _not_safetensors(file: Path, size: int) -> str:
    return (
        f"{file} is not a safetensors file: its {size} bytes do not start with a header. It may be a pointer to a "
        "large file that was never fetched; fetch the file itself."
    )
