"""GPTQ: integers packed along the input axis, transposed, with zero points packed along the output axis.

value[o, i] = (code[i, o] - zero[g_idx[i], o]) * scale[g_idx[i], o]. Layout "gptq" stores zero - 1,
"gptq_v2" the zero itself. Sources: `pack` and `forward` of AutoGPTQ's qlinear_cuda_old.py,
`dequantize_weight` and `convert_gptq_v1_to_v2_format_module` of GPTQModel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtp_engines.errors import CheckpointError
from mtp_exporter.quantised.grouped import ADVICE, dequantise, group_of_columns, group_size, stored_groups
from mtp_exporter.quantised.raw import SCALE_TYPES, columns_of, floats, unpack
from mtp_exporter.quantised.settings import Settings
from mtp_exporter.quantised.stored import Floats, QuantisedTensor, UnreadableError
from mtp_exporter.reading.safetensors_file import TensorInfo

BITS = (2, 4, 8)
_ROLES = ("qweight", "qzeros", "scales", "g_idx")
_ADDED = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class _Gptq:
    bits: int
    columns: int
    size: int
    added: int
    is_symmetric: bool
    weight: TensorInfo
    zeros: TensorInfo
    scales: TensorInfo
    g_idx: TensorInfo | None

    def rows(self, start: int, count: int) -> Floats:
        """float32[count, columns]; rows of the tensor are columns on disk."""
        codes = unpack(columns_of(self.weight, start, count).T, self.bits)[:, : self.columns]
        scales = floats(columns_of(self.scales, start, count).T)
        return dequantise(codes, self._zeros(start, count), scales, self._group_of())

    def _zeros(self, start: int, count: int) -> Floats:
        """float32[count, groups].

        Raises:
            CheckpointError: the stored zero points have no certain meaning.
        """
        fields = 32 // self.bits
        first = start // fields
        words = columns_of(self.zeros, first, -(-(start + count) // fields) - first)
        stored = unpack(words, self.bits)
        if self.added and not self.is_symmetric:
            self._check_overflow(stored, first * fields)
        stored = stored[:, start - first * fields :][:, :count]
        if self.is_symmetric:
            return np.full((count, stored.shape[0]), self._middle(stored), np.float32)
        return ((stored + np.uint8(self.added)) & np.uint8((1 << self.bits) - 1)).T.astype(np.float32)

    def _middle(self, stored: npt.NDArray[np.uint8]) -> int:
        """The zero point of symmetric weights, whichever layout the stored ones are in.

        Writers have labelled one layout as the other; kernels for symmetric weights do not read the zero
        points at all, so that nobody noticed.
        """
        middle = 1 << (self.bits - 1)
        if stored.size and not ((stored == middle).all() or (stored == middle - 1).all()):
            raise CheckpointError(
                f"Tensor {self.zeros.name!r} in {self.zeros.file} holds zero points from {stored.min()} to "
                f"{stored.max()}, but config.json says that the weights are symmetric, which makes every one "
                f"{middle - 1} or {middle}; {ADVICE}."
            )
        return middle

    def _check_overflow(self, stored: npt.NDArray[np.uint8], start: int) -> None:
        """Refuse words in which zero - 1 was taken of a zero of 0.

        One writer overflows into every later field of the word, another borrows from the next one, and
        kernels read 0 or 2^bits. Only in the last field do all writers agree, on 0.

        Args:
            stored: uint8[groups, outputs from `start`], whole words.
        """
        output = start + np.arange(stored.shape[1])
        fields = 32 // self.bits
        is_inner = (output % fields != fields - 1) & (output < self.scales.shape[1] - 1)
        if (stored[:, is_inner] == (1 << self.bits) - 1).any():
            raise CheckpointError(
                f"Tensor {self.zeros.name!r} in {self.zeros.file} holds a zero point that overflowed when 1 was taken "
                f"from it, so that its neighbours are uncertain too; {ADVICE}, or one in the layout gptq_v2."
            )

    def _group_of(self) -> npt.NDArray[np.intp]:
        if self.g_idx is None:
            return group_of_columns(self.columns, self.size)
        return stored_groups(self.g_idx, self.scales.shape[0])


def gptq_tensor(name: str, roles: Mapping[str, TensorInfo], settings: Settings) -> QuantisedTensor:
    """The tensor of `qweight` packed along the input axis.

    Args:
        roles: qweight I32[ceil(in * bits / 32), out], qzeros I32[groups, ceil(out * bits / 32)],
            scales [groups, out], maybe g_idx I32[in].

    Raises:
        UnreadableError: a part is missing, unknown, or does not fit the others or config.json.
    """
    if settings.method != "gptq" or settings.layout not in (None, *_ADDED):
        raise UnreadableError(
            f"config.json says method {settings.method!r} and layout {settings.layout!r}, expected 'gptq' with 'gptq' "
            "or 'gptq_v2'"
        )
    unknown = sorted(roles[role].name for role in roles if role not in _ROLES)
    if unknown:
        raise UnreadableError(f"it has a companion {unknown[0]!r} of unknown meaning")
    weight, zeros, scales, g_idx = roles["qweight"], roles["qzeros"], roles["scales"], roles.get("g_idx")
    if scales.dtype not in SCALE_TYPES:
        raise UnreadableError(f"its scales have dtype {scales.dtype}, expected {' or '.join(SCALE_TYPES)}")
    if g_idx is None and settings.reordered:
        raise UnreadableError("config.json says desc_act, and it has no g_idx that gives the order")
    if g_idx is not None and (g_idx.dtype not in ("I32", "I64") or len(g_idx.shape) != 1):
        raise UnreadableError(f"its g_idx is {g_idx.dtype} {list(g_idx.shape)}, expected I32 [in]")
    groups, rows = scales.shape
    bits = _bits(rows, zeros, weight, g_idx, settings)
    columns = g_idx.shape[0] if g_idx is not None else weight.shape[0] * 32 // bits
    if zeros.shape[0] != groups or -(-columns * bits // 32) != weight.shape[0]:
        raise UnreadableError(
            f"qweight {list(weight.shape)}, qzeros {list(zeros.shape)}, scales {list(scales.shape)} and {columns} "
            f"columns do not fit {bits} bits"
        )
    size = group_size(columns, groups, settings.group_sizes)
    # Absent, the field means the older layout: it came with the newer one.
    added = _ADDED[settings.layout or "gptq"]
    decoder = _Gptq(bits, columns, size, added, settings.symmetric == {True}, weight, zeros, scales, g_idx)
    parts = tuple(roles[role] for role in _ROLES if role in roles)
    label = "per channel" if groups == 1 else f"group {size}"
    return QuantisedTensor(name, f"GPTQ {bits}-bit ({label})", (rows, columns), parts, decoder.rows)


def _bits(rows: int, zeros: TensorInfo, weight: TensorInfo, g_idx: TensorInfo | None, settings: Settings) -> int:
    fitting = [
        bits
        for bits in range(1, 9)
        if -(-rows * bits // 32) == zeros.shape[1]
        and (g_idx is None or -(-g_idx.shape[0] * bits // 32) == weight.shape[0])
    ]
    stated = [bits for bits in fitting if bits in settings.bits] if settings.bits else fitting
    if fitting and not stated:
        raise UnreadableError(
            f"its shapes are those of {' or '.join(map(str, fitting))} bits, config.json says "
            f"{' or '.join(map(str, sorted(settings.bits)))}"
        )
    usable = [bits for bits in stated if bits in BITS]
    if len(usable) != 1:
        raise UnreadableError(
            f"its shapes are those of {' or '.join(map(str, stated)) or 'no whole number of'} bits, expected one of "
            f"{', '.join(map(str, BITS))}"
        )
    return usable[0]
