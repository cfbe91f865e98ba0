"""AWQ "gemm": 4-bit integers and zero points packed along the output axis in an interleaved order.

The eight fields of a word, lowest bits first, hold outputs 0, 2, 4, 6, 1, 3, 5, 7 of their eight.
value[o, i] = (code[i, o] - zero[i // size, o]) * scale[i // size, o]; zero points are stored as they
are. Sources: `WQLinear_GEMM.from_linear` and `dequantize_gemm` of AutoAWQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtp_exporter.quantised.grouped import dequantise, group_of_columns, group_size
from mtp_exporter.quantised.raw import SCALE_TYPES, columns_of, floats
from mtp_exporter.quantised.settings import Settings
from mtp_exporter.quantised.stored import Floats, QuantisedTensor, UnreadableError
from mtp_exporter.reading.safetensors_file import TensorInfo

BITS = 4
FIELDS = 32 // BITS
_ROLES = ("qweight", "qzeros", "scales")
# Which of the eight outputs of a word lies in its first field, its second, ...
_OUTPUT_OF = (0, 2, 4, 6, 1, 3, 5, 7)
# "exllama" is a kernel: the files are those of "gemm".
_LAYOUTS = (None, "gemm", "exllama")


@dataclass(frozen=True)
class _Awq:
    size: int
    weight: TensorInfo
    zeros: TensorInfo
    scales: TensorInfo

    def rows(self, start: int, count: int) -> Floats:
        """float32[count, columns]; rows of the tensor are fields of words on disk."""
        codes = _outputs(self.weight, start, count)
        zeros = _outputs(self.zeros, start, count).astype(np.float32)
        scales = floats(columns_of(self.scales, start, count).T)
        return dequantise(codes, zeros, scales, group_of_columns(self.weight.shape[0], self.size))


def awq_tensor(name: str, roles: Mapping[str, TensorInfo], settings: Settings) -> QuantisedTensor:
    """The tensor of `qweight` packed along the output axis.

    Args:
        roles: qweight I32[in, out / 8], qzeros I32[groups, out / 8], scales [groups, out].

    Raises:
        UnreadableError: a part is missing, unknown, or does not fit the others or config.json.
    """
    if settings.method != "awq" or settings.layout not in _LAYOUTS:
        raise UnreadableError(
            f"config.json says method {settings.method!r} and layout {settings.layout!r}, expected 'awq' with 'gemm'"
        )
    if settings.bits and BITS not in settings.bits:
        raise UnreadableError(
            f"its shapes are those of {BITS} bits, config.json says {' or '.join(map(str, sorted(settings.bits)))}"
        )
    unknown = sorted(roles[role].name for role in roles if role not in _ROLES)
    if unknown:
        raise UnreadableError(f"it has a companion {unknown[0]!r} of unknown meaning")
    weight, zeros, scales = (roles[role] for role in _ROLES)
    if scales.dtype not in SCALE_TYPES:
        raise UnreadableError(f"its scales have dtype {scales.dtype}, expected {' or '.join(SCALE_TYPES)}")
    groups, rows = scales.shape
    if zeros.shape != (groups, weight.shape[1]):
        raise UnreadableError(
            f"its qzeros have shape {list(zeros.shape)}, expected {[groups, weight.shape[1]]} as its qweight and scales"
        )
    columns = weight.shape[0]
    size = group_size(columns, groups, settings.group_sizes)
    label = "per channel" if groups == 1 else f"group {size}"
    decoder = _Awq(size, weight, zeros, scales)
    return QuantisedTensor(name, f"AWQ {BITS}-bit ({label})", (rows, columns), (weight, zeros, scales), decoder.rows)


def _outputs(words: TensorInfo, start: int, count: int) -> npt.NDArray[np.uint8]:
    """uint8[count, entries]: the fields of outputs `start` to `start + count` of words I32[entries, out / 8]."""
    first = start // FIELDS
    taken = columns_of(words, first, -(-(start + count) // FIELDS) - first)
    # Turned over while packed, an eighth of the bytes.
    turned = np.ascontiguousarray(taken.T).view("<u4")
    outputs = np.empty((turned.shape[0], FIELDS, turned.shape[1]), np.uint8)
    for place, output in enumerate(_OUTPUT_OF):
        outputs[:, output] = (turned >> np.uint32(BITS * place)) & np.uint32(15)
    return outputs.reshape(turned.shape[0] * FIELDS, turned.shape[1])[start - first * FIELDS :][:count]
