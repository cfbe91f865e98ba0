"""Stored numbers of a tensor as NumPy has them: whole, some rows, or some columns."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mtp_engines.errors import CheckpointError
from mtp_exporter.quantised.stored import Floats, UnreadableError
from mtp_exporter.reading.safetensors_file import FLOAT_TYPES, TensorInfo

Array = npt.NDArray[Any]

# F8_E4M3 is the variant without infinities, as PyTorch's float8_e4m3fn; E8M0 is a bare power of two.
FP8_TYPES: dict[str, np.dtype[Any]] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
SCALE_TYPES = ("F32", "BF16", "F16")
_TYPES: dict[str, np.dtype[Any]] = {
    **FLOAT_TYPES,
    **FP8_TYPES,
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}


def check_size(tensor: TensorInfo) -> None:
    """Refuse a header entry whose bytes do not fit its shape; headers of one-byte types are not checked before.

    Raises:
        UnreadableError: they differ.
    """
    kind = _TYPES.get(tensor.dtype)
    if kind is not None and tensor.size != prod(tensor.shape) * kind.itemsize:
        raise UnreadableError(
            f"{tensor.name!r} has {tensor.size} bytes where its shape {list(tensor.shape)} and dtype {tensor.dtype} "
            f"need {prod(tensor.shape) * kind.itemsize}"
        )


def whole(tensor: TensorInfo) -> Array:
    """Everything, in the stored dtype and shape."""
    return np.frombuffer(b"".join(tensor.raw_blocks()), _TYPES[tensor.dtype]).reshape(tensor.shape)


def rows_of(tensor: TensorInfo, start: int, count: int) -> Array:
    """dtype[count, *shape[1:]]: entries of the first axis, in the stored dtype."""
    width = prod(tensor.shape[1:]) * _TYPES[tensor.dtype].itemsize
    shape = (count, *tensor.shape[1:])
    return whole(replace(tensor, shape=shape, offset=tensor.offset + start * width, size=count * width))


def columns_of(tensor: TensorInfo, start: int, count: int) -> Array:
    """dtype[rows, count]: some columns of a matrix, read row by row so that the others stay on disk.

    Raises:
        CheckpointError: the file got shorter since its header was read.
    """
    rows, width = tensor.shape
    if count == width:
        return whole(tensor)
    kind = _TYPES[tensor.dtype]
    raw = np.empty((rows, count * kind.itemsize), np.uint8)
    # Unbuffered: a buffer would be filled anew, with neighbours, for every row.
    with tensor.file.open("rb", buffering=0) as stream:
        for row in range(rows):
            stream.seek(tensor.offset + (row * width + start) * kind.itemsize)
            if stream.readinto(raw[row]) != raw.shape[1]:
                raise CheckpointError(f"{tensor.file} ended inside tensor {tensor.name!r}; fetch the file again.")
    return raw.view(kind)


def floats(stored: Array) -> Floats:
    """Any stored numbers as float32; a NaN stays one."""
    # Casting a NaN may warn; whoever reads the values checks that they are finite.
    with np.errstate(invalid="ignore", over="ignore"):
        if stored.dtype.itemsize > 1 or stored.dtype == np.int8:
            return stored.astype(np.float32)
        # Each of the 256 numbers is cast once: the cast of ml_dtypes is several times as slow as a table.
        table = np.arange(256, dtype=np.uint8).view(stored.dtype).astype(np.float32)
    return table.take(stored.view(np.uint8))


def unpack(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """uint8[..., words * 32 / bits]: the fields of 32-bit words along the last axis, the lowest bits first.

    Args:
        words: int32[..., words].
        bits: 2, 4 or 8, so that no field crosses a byte.
    """
    octets = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return octets
    fields = [(octets >> np.uint8(shift)) & np.uint8((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(fields, axis=-1).reshape(*octets.shape[:-1], octets.shape[-1] * len(fields))
