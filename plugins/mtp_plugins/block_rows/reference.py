"""NumPy reference of BlockRows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array
from mtp_plugins.block_weight.reference import Bytes, block_weight


def block_rows(blocks: Bytes, scales: Array, by: Array, columns: int, ids: npt.NDArray[np.int64]) -> Array:
    """float[..., columns] for uint8[rows, count, 32], float[rows, count], float[63, 64] and int64[...]."""
    flat = ids.reshape(-1)
    rows: Array = block_weight(blocks[flat], scales[flat], by, columns).reshape(*ids.shape, -1)
    return rows
