"""Matrices of a bundle in the layout of the kernels."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.errors import BundleError
from mtp_engines.kernels.library import INSTRUCTIONS, instructions, kernels, path_of_kernels
from mtp_plugins.block_weight import BLOCK, USED

Integers = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class PackedMatrices:
    """Memory of packed matrices, which an engine's sessions read by address.

    It lies in huge pages where the system gives them. An address is good for opening sessions for as long as this
    object lives; sessions that are open keep the memory.
    """

    def __init__(self, threads: int = 1, used: str | None = None) -> None:
        """Args:
        threads: that pack a matrix.
        used: one of `INSTRUCTIONS` that this processor has, for all sessions that read these; None chooses.
        """
        self._threads = threads
        self.used = used or instructions()
        self._arena = kernels().mtp_new_arena(INSTRUCTIONS.index(self.used))
        weakref.finalize(self, kernels().mtp_let_arena_go, self._arena)

    def blocks(self, blocks: Integers, scales: Floats, columns: int) -> int:
        """The address of a matrix for `BlockWeight`'s operands, uint8[rows, count, 32] and float32[rows, count]."""
        count = -(-columns // USED)
        _require(blocks, np.uint8, (*blocks.shape[:1], count, BLOCK // 2))
        _require(scales, np.float32, (len(blocks), count))
        blocks, scales = np.ascontiguousarray(blocks), np.ascontiguousarray(scales)
        return _known(
            kernels().mtp_pack_blocks(
                self._arena, blocks.ctypes.data, scales.ctypes.data, len(blocks), columns, self._threads
            )
        )

    def rotated(self, values: Integers, scales: Floats, run: int, *, by_rows: bool) -> int:
        """The address of a matrix for `RotatedWeight`'s operands, uint8[columns, rows] and float32[rows].

        Args:
            run: columns that are turned together.
            by_rows: values are uint8[rows, columns].
        """
        rows, columns = values.shape if by_rows else values.shape[::-1]
        _require(values, np.uint8, values.shape)
        _require(scales, np.float32, (rows,))
        if columns % run or run & (run - 1):
            raise BundleError(
                f"Runs of {run} columns cannot be turned in a matrix of {columns}. Build the bundle again."
            )
        values, scales = np.ascontiguousarray(values), np.ascontiguousarray(scales)
        return _known(
            kernels().mtp_pack_rotated(
                self._arena, values.ctypes.data, scales.ctypes.data, len(scales), columns, run, by_rows, self._threads
            )
        )

    def whole(self, values: Floats) -> int:
        """The address of a matrix float32[rows, columns]."""
        _require(values, np.float32, (len(values), *values.shape[1:2]))
        values = np.ascontiguousarray(values)
        return _known(kernels().mtp_pack_whole(self._arena, values.ctypes.data, *values.shape, self._threads))


def _require(array: npt.NDArray[Any], kind: type, shape: tuple[int, ...]) -> None:
    """The kernels read memory by these sizes: what a bundle says elsewhere must not lead them astray."""
    if array.dtype != kind or array.shape != shape:
        raise BundleError(
            f"A matrix of the bundle is {array.dtype}{list(array.shape)}, expected {np.dtype(kind)}{list(shape)}. "
            "Build the bundle again."
        )


def packed_matrices(threads: int = 1) -> PackedMatrices | None:
    """Memory for one engine's matrices; None where ONNX Runtime's kernels multiply."""
    return None if path_of_kernels() is None else PackedMatrices(threads)


def _known(address: int | None) -> int:
    if address is None:
        raise BundleError("There is not enough memory for the weights. Close other programs, or take a smaller model.")
    return address
