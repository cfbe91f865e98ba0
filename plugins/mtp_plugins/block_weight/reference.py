"""NumPy reference of BlockWeight, and the turn itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array
from mtp_plugins.rotated_weight.reference import rotation, runs_times

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def turning() -> Floats:
    """float32[63, 64], a Hadamard matrix over 8 without its first row, which is the only one that does not sum to 0."""
    return rotation(64)[1:].copy()


def turned(rows: Array, by: Array) -> Array:
    """float[..., count, 64] for float[..., columns]: runs of 63 columns times float[63, 64], the last one padded."""
    used = len(by)
    missing = -rows.shape[-1] % used
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else rows
    return runs_times(padded.reshape(-1, used), by).reshape(*rows.shape[:-1], -1, by.shape[1])


def integers(blocks: Bytes) -> Bytes:
    """uint8[..., 64] values of uint8[..., 32] blocks."""
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1)
    return pairs.reshape(*blocks.shape[:-1], 2 * blocks.shape[-1])


def block_weight(blocks: Bytes, scales: Array, by: Array, columns: int) -> Array:
    """float[rows, columns] for uint8[rows, count, 32], float[rows, count] and float[63, 64]."""
    values = integers(blocks).astype(scales.dtype) - scales.dtype.type(8)
    runs = (values * scales[..., None]) @ by.T.astype(scales.dtype)
    weight: Array = runs.reshape(len(blocks), -1)[:, :columns]
    return weight
