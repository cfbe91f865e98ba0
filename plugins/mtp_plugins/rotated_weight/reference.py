"""NumPy reference of RotatedWeight, and the rotation itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_WIDEST = 64
_TOGETHER = 64
"""Runs of a product. BLAS would share out more of them among threads of its own, which takes longer than the product
and up to fifty times as long where the processor has other work."""


def rotation(columns: int) -> Floats:
    """float32[size, size], Sylvester's Hadamard matrix over the root of its size, which is its own inverse.

    The size is the greatest power of two up to 64 that divides the columns.
    """
    matrix = np.ones((1, 1))
    while 2 * len(matrix) <= _WIDEST and columns % (2 * len(matrix)) == 0:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    by: Floats = (matrix / np.sqrt(len(matrix))).astype(np.float32)
    return by


def rotate(rows: Array, by: Array) -> Array:
    """float[..., columns]: every run of columns times the rotation float[size, size]."""
    return runs_times(rows.reshape(-1, len(by)), by).reshape(rows.shape)


def runs_times(runs: Array, by: Array) -> Array:
    """float[count, width] for float[count, size] and float[size, width], some runs at a time."""
    size, width = by.shape
    turned, whole = np.empty((len(runs), width), np.result_type(runs, by)), len(runs) // _TOGETHER * _TOGETHER
    np.matmul(runs[:whole].reshape(-1, _TOGETHER, size), by, out=turned[:whole].reshape(-1, _TOGETHER, width))
    turned[whole:] = runs[whole:] @ by
    return turned


def rotated_weight(values: Bytes, scales: Array, by: Array) -> Array:
    """float[rows, columns] for uint8[columns, rows], float[rows] and float[size, size]."""
    stored = (values.T.astype(scales.dtype) - scales.dtype.type(128)) * scales[:, None]
    return rotate(stored, by.astype(scales.dtype))
