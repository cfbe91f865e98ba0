"""Tensors of a claimed checkpoint by role, as NumPy arrays, read when asked for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mtp_exporter.families.description import Need
from mtp_exporter.safetensors_file import TensorInfo

Floats = npt.NDArray[np.float32]


class Source:
    """Reads float32 values straight from the checkpoint's files, with the family's transform applied."""

    def __init__(self, claimed: Mapping[str, tuple[Need, TensorInfo]]) -> None:
        self._claimed = claimed

    def __call__(self, role: str) -> Floats:
        """A whole tensor."""
        need, tensor = self._claimed[role]
        return _transformed(tensor.read(), need)

    def rows(self, role: str, start: int, count: int) -> Floats:
        """Some entries of the first axis."""
        need, tensor = self._claimed[role]
        return _transformed(tensor.rows(start, count), need)

    def gather(self, role: str, ids: npt.NDArray[np.int64]) -> Floats:
        """float32[len(ids), ...]: the entries of the first axis at `ids`."""
        return np.concatenate([self.rows(role, int(index), 1) for index in ids])


def _transformed(values: Floats, need: Need) -> Floats:
    return values if need.transform == "none" else np.float32(1) + values
