"""NumPy reference of BlockWeight."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array

Bytes = npt.NDArray[np.uint8]


def integers(blocks: Bytes) -> Bytes:
    """uint8[..., 32] values of uint8[..., 16] blocks."""
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1)
    return pairs.reshape(*blocks.shape[:-1], 2 * blocks.shape[-1])


def block_weight(blocks: Bytes, scales: Array) -> Array:
    """float[rows, columns] for uint8[rows, columns / 32, 16] and float[rows, columns / 32]."""
    values = integers(blocks).astype(scales.dtype) - scales.dtype.type(8)
    weight: Array = (values * scales[..., None]).reshape(len(blocks), -1)
    return weight
