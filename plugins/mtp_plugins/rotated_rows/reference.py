"""NumPy reference of RotatedRows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_plugins.arrays import Array
from mtp_plugins.rotated_weight.reference import Bytes, rotated_weight


def rotated_rows(values: Bytes, scales: Array, by: Array, ids: npt.NDArray[np.int64]) -> Array:
    """float[..., columns] for uint8[rows, columns], float[rows], float[size, size] and int64[...]."""
    flat = ids.reshape(-1)
    rows: Array = rotated_weight(values[flat].T, scales[flat], by).reshape(*ids.shape, -1)
    return rows
