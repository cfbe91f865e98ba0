"""compressed-tensors' "pack-quantized": integers packed along the rows into 32-bit words.

A code is the signed integer plus 2^(bits - 1), the first one in the lowest bits; zero points are coded
the same way and packed along the output axis. value = (code - zero code) * scale. Sources:
`pack_to_int32` in compressors/pack_quantized/helpers.py and `_dequantize` in
quantization/lifecycle/forward_helpers.py; before packing came to zero points they were plain int8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtp_exporter.quantised.grouped import dequantise, group_of_columns, group_size, stored_groups
from mtp_exporter.quantised.raw import SCALE_TYPES, floats, rows_of, unpack, whole
from mtp_exporter.quantised.settings import Settings
from mtp_exporter.quantised.stored import Floats, QuantisedTensor, UnreadableError
from mtp_exporter.reading.safetensors_file import TensorInfo

BITS = (4, 8)
_ROLES = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class _Packed:
    bits: int
    columns: int
    size: int
    weight: TensorInfo
    scale: TensorInfo
    zeros: TensorInfo | None
    g_idx: TensorInfo | None

    def rows(self, start: int, count: int) -> Floats:
        """float32[count, columns]."""
        codes = unpack(rows_of(self.weight, start, count), self.bits)[:, : self.columns]
        scales = self._scales(start, count)
        zeros = np.full(scales.shape, 1 << (self.bits - 1), np.float32) + self._signed_zeros(start, count)
        return dequantise(codes, zeros, scales, self._group_of())

    def _scales(self, start: int, count: int) -> Floats:
        """float32[count, groups]."""
        if self.scale.size and len(self.scale.shape) > 0 and self.scale.shape[0] == self.weight.shape[0]:
            return floats(rows_of(self.scale, start, count)).reshape(count, self._groups)
        return np.full((count, 1), floats(whole(self.scale)).reshape(()), np.float32)

    def _signed_zeros(self, start: int, count: int) -> Floats:
        """float32[count, groups], or 0."""
        if self.zeros is None:
            return np.zeros((), np.float32)
        if self.zeros.dtype == "I8":
            return floats(rows_of(self.zeros, start, count)).reshape(count, self._groups)
        fields = 32 // self.bits
        first = start // fields
        words = rows_of(self.zeros, first, -(-(start + count) // fields) - first)
        codes = unpack(words.T, self.bits).T[start - first * fields :][:count]
        return codes.astype(np.float32) - np.float32(1 << (self.bits - 1))

    @property
    def _groups(self) -> int:
        return self.scale.shape[1] if len(self.scale.shape) == 2 else 1

    def _group_of(self) -> npt.NDArray[np.intp]:
        if self.g_idx is None:
            return group_of_columns(self.columns, self.size)
        # -1 is what an index holds that was made and never filled: the columns are in order.
        if np.array_equal(np.unique(whole(self.g_idx)), [-1]):
            return group_of_columns(self.columns, self.size)
        return stored_groups(self.g_idx, self._groups)


def packed_tensor(name: str, roles: Mapping[str, TensorInfo], settings: Settings) -> QuantisedTensor:
    """The tensor of `weight_packed`.

    Args:
        roles: weight_packed I32[out, ceil(in * bits / 32)], weight_scale [out, groups], weight_shape [2]; maybe
            weight_zero_point I32[ceil(out * bits / 32), groups] or I8[out, groups], weight_g_idx I32[in].

    Raises:
        UnreadableError: a part is missing, unknown, or does not fit the others.
        CheckpointError: the file of `weight_shape` got shorter since its header was read.
    """
    unknown = sorted(roles[role].name for role in roles if role not in _ROLES)
    if unknown:
        raise UnreadableError(f"it has a companion {unknown[0]!r} of unknown meaning")
    absent = [role for role in _ROLES[:3] if role not in roles]
    if absent:
        raise UnreadableError(f"it has no {absent[0]}")
    weight, scale = roles["weight_packed"], roles["weight_scale"]
    zeros, g_idx = roles.get("weight_zero_point"), roles.get("weight_g_idx")
    rows, columns = _logical_shape(weight, roles["weight_shape"])
    bits = _bits(columns, weight.shape[1], settings)
    groups = _groups(scale, rows)
    size = group_size(columns, groups, settings.group_sizes)
    _check_zeros(zeros, (rows, groups), bits, settings)
    if g_idx is not None and (g_idx.dtype not in ("I32", "I64") or g_idx.shape != (columns,)):
        raise UnreadableError(f"its weight_g_idx is {g_idx.dtype} {list(g_idx.shape)}, expected I32 [{columns}]")
    decoder = _Packed(bits, columns, size, weight, scale, zeros, g_idx)
    label = "per channel" if groups == 1 else f"group {size}"
    parts = tuple(roles[role] for role in _ROLES if role in roles)
    return QuantisedTensor(name, f"packed {bits}-bit ({label})", (rows, columns), parts, decoder.rows)


def _logical_shape(weight: TensorInfo, shape: TensorInfo) -> tuple[int, int]:
    """The content of weight_shape; the padding at the end of a row hides it from the header."""
    if shape.dtype not in ("I32", "I64") or shape.shape != (2,):
        raise UnreadableError(f"its weight_shape is {shape.dtype} {list(shape.shape)}, expected I64 [2]")
    if weight.dtype != "I32" or len(weight.shape) != 2:
        raise UnreadableError(f"it is packed as {weight.dtype} {list(weight.shape)}, expected I32 [out, words]")
    rows, columns = (int(size) for size in whole(shape))
    if rows != weight.shape[0] or columns < 1:
        raise UnreadableError(f"its weight_shape says {[rows, columns]} where {weight.shape[0]} rows are packed")
    return rows, columns


def _bits(columns: int, words: int, settings: Settings) -> int:
    fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words]
    stated = [bits for bits in fitting if bits in settings.bits] if settings.bits else fitting
    if fitting and not stated:
        raise UnreadableError(
            f"{words} words for {columns} columns are {' or '.join(map(str, fitting))} bits, config.json says "
            f"{' or '.join(map(str, sorted(settings.bits)))}"
        )
    usable = [bits for bits in stated if bits in BITS]
    if len(usable) != 1:
        raise UnreadableError(
            f"{words} words for {columns} columns are {' or '.join(map(str, stated)) or 'no whole number of'} bits, "
            f"expected {' or '.join(map(str, BITS))}"
        )
    return usable[0]


def _groups(scale: TensorInfo, rows: int) -> int:
    if scale.dtype not in SCALE_TYPES:
        raise UnreadableError(f"its scale has dtype {scale.dtype}, expected {' or '.join(SCALE_TYPES)}")
    if len(scale.shape) == 2 and scale.shape[0] == rows:
        return scale.shape[1]
    if scale.shape in ((), (1,), (1, 1), (rows,)):
        return 1
    raise UnreadableError(f"its scale has shape {list(scale.shape)}, expected [{rows}, groups]")


def _check_zeros(zeros: TensorInfo | None, shape: tuple[int, int], bits: int, settings: Settings) -> None:
    rows, groups = shape
    if zeros is None:
        if settings.symmetric == {False}:
            raise UnreadableError("config.json says that it is not symmetric, and it has no zero point")
        return
    words = -(-rows * bits // 32)
    if (zeros.dtype, zeros.shape) not in (("I32", (words, groups)), ("I8", (rows, groups))):
        raise UnreadableError(
            f"its zero point is {zeros.dtype} {list(zeros.shape)}, expected I32 [{words}, {groups}] or I8 "
            f"[{rows}, {groups}]"
        )
