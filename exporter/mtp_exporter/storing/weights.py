"""Streams tensors from a checkpoint into the one weight file of a bundle."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir

from mtp_engines.contracts.manifest import WeightFormats
from mtp_exporter.families.description import INTEGERS, Need
from mtp_exporter.quantised import StoredTensor
from mtp_exporter.reading.source import Source, Values
from mtp_exporter.storing.blocks import block_count, four_bits
from mtp_exporter.storing.formats import format_of, is_gathered
from mtp_exporter.storing.rotated import eight_bits, transposed
from mtp_plugins.block_weight import BLOCK

_PAGE = 4096
_SMALL = 1 << 20
_LINE = 64

Progress = Callable[[int], None]
"""Told the number of bytes just written."""


@dataclass(frozen=True)
class Blocks:
    """A matrix that is stored as blocks; see `mtp_plugins.block_weight`."""

    blocks: ir.ExternalTensor
    scales: ir.ExternalTensor
    columns: int


@dataclass(frozen=True)
class Rotated:
    """A matrix that is stored as rotated integers; see `mtp_plugins.rotated_weight`.

    `values` are uint8[columns, rows] as products read them, or with `by_rows` uint8[rows, columns].
    """

    values: ir.ExternalTensor
    scales: ir.ExternalTensor
    columns: int
    by_rows: bool


Stored = ir.ExternalTensor | Blocks | Rotated


def stored_bytes(need: Need, formats: WeightFormats | None = None) -> int:
    """Bytes of a need in the weight file: float32, int64 for ids, or integers with float32 scales."""
    kind = format_of(formats or WeightFormats(), need)
    if kind == "int8":
        return prod(need.shape) + 4 * need.shape[0]
    if kind == "int4":
        return need.shape[0] * block_count(need.shape[1]) * (BLOCK // 2 + 4)
    return prod(need.shape) * (8 if need.transform in INTEGERS else 4)


def shared_key(need: Need, tensors: tuple[StoredTensor, ...]) -> object:
    """Equal for roles that have the same values: same places in the same files, same transform."""
    parts = tuple((tensor.file, part) for part, tensor in zip(need.parts, tensors, strict=True))
    return parts, need.transform


class WeightWriter:
    """Appends tensors to a file and gives references into it.

    Never more than one block of a tensor is in memory. A tensor that two roles share is written once.
    """

    def __init__(self, path: Path, source: Source, formats: WeightFormats, progress: Progress) -> None:
        """`source` gives the values of the checkpoint, before they are rounded to the formats."""
        self._path, self._source, self._formats, self._progress = path, source, formats, progress
        self._stream = path.open("wb")
        self._written: dict[object, Stored] = {}
        self._hashing = ThreadPoolExecutor(1)
        self.digests: dict[str, str] = {}
        """Role -> sha256 of its values, for every tensor written so far."""

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hashing.shutdown()
        self._stream.close()

    def add(self, need: Need) -> Stored:
        """Write the values of a need and return the reference to them.

        Raises:
            CheckpointError: a value is not finite.
        """
        key = shared_key(need, self._source.tensors(need.role))
        if key not in self._written:
            kind = format_of(self._formats, need)
            if kind == "int8":
                self._written[key] = self._add_rotated(need)
            else:
                self._written[key] = self._add_blocks(need) if kind == "int4" else self._add_whole(need)
        return self._written[key]

    def _add_whole(self, need: Need) -> ir.ExternalTensor:
        dtype = ir.DataType.INT64 if need.transform in INTEGERS else ir.DataType.FLOAT
        tensor = self._reserve(need.role, dtype, need.shape, stored_bytes(need))
        for block in self._read(need):
            self._stream.write(np.ascontiguousarray(block).data)
            self._progress(block.nbytes)
        return tensor

    def _add_blocks(self, need: Need) -> Blocks:
        rows, columns = need.shape
        count = block_count(columns)
        blocks, scales = self._reserve_pair(need, "blocks", (rows, count, BLOCK // 2), (rows, count))
        self._write_pairs(blocks, scales, map(four_bits, self._read(need)))
        return Blocks(blocks, scales, columns)

    def _add_rotated(self, need: Need) -> Rotated:
        rows, columns = need.shape
        by_rows = is_gathered(need)
        shape = (rows, columns) if by_rows else (columns, rows)
        values, scales = self._reserve_pair(need, "values", shape, (rows,))
        pairs: Iterator[tuple[Values, Values]] = map(eight_bits, self._read(need))
        if not by_rows:
            # A byte for each weight: a fraction of what one block takes as floats, but for the widest matrices.
            whole = list(pairs)
            integers, found = (np.concatenate(parts) for parts in zip(*whole, strict=True))
            pairs = iter([(transposed(integers), found)])
        self._write_pairs(values, scales, pairs)
        return Rotated(values, scales, columns, by_rows)

    def _reserve_pair(
        self, need: Need, name: str, shape: tuple[int, ...], scales: tuple[int, ...]
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Room for uint8 integers and, behind them, their scales."""
        integers = self._reserve(f"{need.role}.{name}", ir.DataType.UINT8, shape, prod(shape))
        self._stream.truncate(self._stream.tell() + prod(shape))
        self._stream.seek(0, os.SEEK_END)
        return integers, self._reserve(f"{need.role}.scales", ir.DataType.FLOAT, scales, 4 * prod(scales))

    def _write_pairs(
        self, integers: ir.ExternalTensor, scales: ir.ExternalTensor, pairs: Iterator[tuple[Values, Values]]
    ) -> None:
        """Write both side by side."""
        places = [self._place(integers), self._place(scales)]
        for pair in pairs:
            for index, values in enumerate(pair):
                data = np.ascontiguousarray(values).data
                self._stream.seek(places[index])
                self._stream.write(data)
                self._progress(data.nbytes)
                places[index] += data.nbytes
        self._stream.seek(0, os.SEEK_END)

    def _read(self, need: Need) -> Iterator[Values]:
        """The values of a need in blocks, whose digest is kept."""
        digest = hashlib.sha256()
        for block in self._source.blocks(need.role):
            # Hashing takes as long as rounding, and runs beside it.
            hashed = self._hashing.submit(digest.update, np.ascontiguousarray(block).data)
            yield block
            hashed.result()
        self.digests[need.role] = digest.hexdigest()

    def _reserve(self, name: str, dtype: ir.DataType, shape: tuple[int, ...], size: int) -> ir.ExternalTensor:
        """A reference to the next `size` bytes, which the caller writes."""
        offset = self._align(_PAGE if size >= _SMALL else _LINE)
        folder = self._path.parent
        return ir.ExternalTensor(
            self._path.name, offset, size, dtype, shape=ir.Shape(shape), name=name, base_dir=folder
        )

    @staticmethod
    def _place(tensor: ir.ExternalTensor) -> int:
        assert tensor.offset is not None
        return tensor.offset

    def _align(self, unit: int) -> int:
        position = self._stream.tell()
        padding = -position % unit
        self._stream.write(b"\0" * padding)
        return position + padding
