"""Packed tensors that cannot be decoded: what they are, and the refusal of whoever reads one.

They stay in the dictionary, because a build may leave them out: an unused tower in a format of its own
is no reason to refuse the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from mtp_engines.errors import CheckpointError
from mtp_exporter.quantised.grouped import ADVICE
from mtp_exporter.quantised.stored import Floats
from mtp_exporter.reading.safetensors_file import TensorInfo

SUPPORTED = "fp8 or int8 with scales, compressed-tensors packed 4- or 8-bit, GPTQ 2-, 4- or 8-bit, and AWQ 4-bit gemm"

# A part that only one method has, by its role.
_MODULE_MARKS = {
    "trellis": "EXL3",
    "q_weight": "EXL2",
    "_weight_qdata": "torchao",
    "B": "Marlin",
    "B_24": "Marlin 2:4",
    "W_q": "HQQ",
}
_MARKS = {
    **_MODULE_MARKS,
    "absmax": "bitsandbytes 4-bit",
    "quant_map": "bitsandbytes 4-bit",
    "_data": "Quanto",
    "SCB": "bitsandbytes int8",
    "weight_blocks": "MXFP4",
    "weight_scales": "EETQ",
    "weight_scale_2": "NVFP4",
    "weight_global_scale": "NVFP4",
}
MODULE_MARKS = frozenset(_MODULE_MARKS)
"""Parts that take the place of a module's `weight`."""
NESTED_MAIN = "_data"
"""The packed numbers of a weight that has parts of its own, one level below it."""
_MAINS = ("qweight", "weight_packed", "weight_blocks", *_MODULE_MARKS, "_data", "weight")


@dataclass(frozen=True)
class Unsupported:
    """A tensor that may be named but not read."""

    name: str
    method: str
    reason: str
    """Why it cannot be read, as a clause, where the method alone does not say it."""
    shape: tuple[int, ...]
    """Of the stored main part: the shape of the floats may not be known."""
    parts: tuple[TensorInfo, ...] = field(repr=False)

    @property
    def dtype(self) -> str:
        """The method, marked as one that cannot be read."""
        return f"{self.method} (not supported)"

    @property
    def file(self) -> Path:
        """The file of the main part."""
        return self.parts[0].file

    @property
    def message(self) -> str:
        """The refusal in one sentence."""
        why = f" and cannot be read, because {self.reason}" if self.reason else ", which cannot be read"
        return (
            f"Tensor {self.name!r} in {self.file} is stored as {self.method}{why}; supported are {SUPPORTED}: {ADVICE}."
        )

    def read(self) -> Floats:
        """Nothing.

        Raises:
            CheckpointError: always.
        """
        self._refuse()

    def rows(self, start: int, count: int) -> Floats:
        """Nothing.

        Raises:
            CheckpointError: always.
        """
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise CheckpointError(self.message)


def unsupported(name: str, roles: Mapping[str, TensorInfo], reason: str = "") -> Unsupported:
    """The tensor whose parts are `roles`, refused for `reason` or for its method."""
    main = next((roles[role] for role in _MAINS if role in roles), next(iter(roles.values())))
    parts = (main, *(part for part in roles.values() if part is not main))
    return Unsupported(name, f"{_method(roles, main.dtype)} (dtype {main.dtype})", reason, main.shape, parts)


def has_mark(roles: Mapping[str, TensorInfo]) -> bool:
    """Whether a part is there that only a method has which cannot be read."""
    return not roles.keys().isdisjoint(_MARKS)


def _method(roles: Mapping[str, TensorInfo], dtype: str) -> str:
    scale = roles.get("weight_scale", roles.get("weight_scale_inv", roles.get("scale")))
    if dtype in ("U8", "I8", "F4") and scale is not None:
        # Two 4-bit floats in a byte: powers of two scale one kind, fp8 numbers the other.
        if scale.dtype in ("U8", "F8_E8M0"):
            return "MXFP4"
        if scale.dtype == "F8_E4M3":
            return "NVFP4"
    if "qweight" in roles:
        return "GPTQ or AWQ" if dtype == "I32" else "packed bytes like those of GGUF"
    marks = [method for role, method in _MARKS.items() if role in roles]
    if marks and not dtype.startswith("F8"):
        return marks[0]
    if "weight_packed" in roles:
        return "compressed-tensors packed integers"
    return "fp8" if dtype.startswith("F8") else "packed numbers"
