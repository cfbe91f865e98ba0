"""Values of a claimed checkpoint by role: parts of tensors put together and transformed, read when asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.errors import CheckpointError
from mtp_exporter.families.description import Claimed, Need
from mtp_exporter.quantised import StoredTensor
from mtp_exporter.reading.safetensors_file import TensorInfo

Floats = npt.NDArray[np.float32]
Values = npt.NDArray[Any]
_BLOCK_BYTES = 32 << 20


class Source:
    """Reads values straight from the checkpoint's files, float32 unless a transform makes them ids."""

    def __init__(self, claimed: Claimed, prefix: str = "") -> None:
        self._claimed, self._prefix = claimed, prefix

    def below(self, prefix: str) -> Source:
        """The values whose role starts with `prefix`."""
        return Source(self._claimed, self._prefix + prefix)

    def need(self, role: str) -> Need:
        """What is known of a role."""
        return self._claimed[self._prefix + role][0]

    def tensors(self, role: str) -> tuple[StoredTensor, ...]:
        """The tensor of each part."""
        return self._claimed[self._prefix + role][1]

    def __call__(self, role: str) -> Values:
        """All values of a role."""
        return self.rows(role, 0, self.need(role).shape[0])

    def rows(self, role: str, start: int, count: int) -> Values:
        """Some entries of the first axis."""
        need, tensors = self._claimed[self._prefix + role]
        if need.transform == "row_to_id":
            return _ids(need, tensors[0])[start : start + count]
        if need.transform == "place":
            return _places(need)[start : start + count]
        values = _float_rows(need, tensors, start, count)
        return np.float32(1) + values if need.transform == "one_plus" else values

    def gather(self, role: str, ids: npt.NDArray[np.int64]) -> Floats:
        """float32[len(ids), ...]: the entries of the first axis at `ids`."""
        return np.concatenate([self.rows(role, int(index), 1) for index in ids])

    def blocks(self, role: str) -> Iterator[Values]:
        """All values of a role in order, in blocks of at most 32 MiB or one entry of the first axis.

        Raises:
            CheckpointError: a value is not finite.
        """
        need, tensors = self._claimed[self._prefix + role]
        entry = max(4 * prod(need.shape[1:]), 1)
        step = max(_BLOCK_BYTES // entry, 1)
        for start in range(0, need.shape[0], step):
            block = self.rows(role, start, min(step, need.shape[0] - start))
            if not np.isfinite(block).all():
                where = " or ".join(sorted({repr(tensor.name) for tensor in tensors})[:2])
                raise CheckpointError(
                    f"Tensor {where} in {tensors[0].file} holds NaN or infinity. Mend the checkpoint or fetch the file "
                    "again."
                )
            yield block

    def digest(self, role: str) -> str:
        """sha256 of all values of a role."""
        state = hashlib.sha256()
        for block in self.blocks(role):
            state.update(np.ascontiguousarray(block).data)
        return state.hexdigest()


def _float_rows(need: Need, tensors: tuple[StoredTensor, ...], start: int, count: int) -> Floats:
    """Entries of the first axis out of parts whose values follow each other."""
    entry = prod(need.shape[1:])
    first, last = start * entry, (start + count) * entry
    found: list[Floats] = []
    position = 0
    for part, tensor in zip(need.parts, tensors, strict=True):
        width = prod(part.shape[1:])
        stop = part.shape[0] if part.stop is None else part.stop
        size = (stop - part.start) * width
        low, high = max(first - position, 0), min(last - position, size)
        if low < high:
            assert low % width == 0, f"{need.role} is asked for inside a row of {part.key}"
            rows = tensor.rows(part.start + low // width, -(-high // width) - low // width)
            found.append(rows.reshape(-1)[: high - low])
        position += size
    assert position == prod(need.shape), f"the parts of {need.role} hold {position} values"
    whole = found[0] if len(found) == 1 else np.concatenate([*found, np.zeros(0, np.float32)])
    return whole.reshape(count, *need.shape[1:])


def _places(need: Need) -> npt.NDArray[np.int64]:
    stops = (part.shape[0] if part.stop is None else part.stop for part in need.parts)
    return np.concatenate([np.arange(part.start, stop) for part, stop in zip(need.parts, stops, strict=True)])


def _ids(need: Need, tensor: StoredTensor) -> npt.NDArray[np.int64]:
    assert isinstance(tensor, TensorInfo), f"{tensor.name} is a table and never quantised"
    offsets = tensor.read_integers()
    return np.arange(need.shape[0], dtype=np.int64) + offsets
