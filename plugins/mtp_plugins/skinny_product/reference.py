"""NumPy reference of SkinnyProduct."""

from __future__ import annotations

import numpy as np

from mtp_plugins.arrays import Array


def skinny_product(x: Array, weight: Array) -> Array:
    """float[..., out] for x float[..., in] and weight float[out, in]."""
    return np.asarray(x @ weight.T)
