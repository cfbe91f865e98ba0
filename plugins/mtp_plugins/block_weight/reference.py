"""NumPy reference of BlockWeight."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array

Bytes = npt.NDArray[np.uint8]


def integers(blocks: Bytes, bits: int) -> Bytes:
    """uint8[..., 32] values of uint8[..., 4 * bits] blocks."""
    if bits == 8:
        return blocks
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1)
    return pairs.reshape(*blocks.shape[:-1], 2 * blocks.shape[-1])


def block_weight(blocks: Bytes, scales: Array, bits: int) -> Array:
    """float[rows, columns] for uint8[rows, columns / 32, 4 * bits] and float[rows, columns / 32]."""
    values = integers(blocks, bits).astype(scales.dtype) - scales.dtype.type(2 ** (bits - 1))
    weight: Array = (values * scales[..., None]).reshape(len(blocks), -1)
    return weight
