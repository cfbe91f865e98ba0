"""Rounding matrices to 8 bits, in the form of `mtp_plugins.rotated_weight`."""

from __future__ import annotations

import numpy as np

from mtp_exporter.source import Floats
from mtp_plugins.rotated_weight.reference import Bytes, rotate, rotation


def eight_bits(rows: Floats) -> tuple[Bytes, Floats]:
    """uint8[rows, columns] and float32[rows] for float32[rows, columns], every row on its own.

    A rotated row spans its greatest magnitude; values are rounded to the nearest.
    """
    turned = rotate(rows, rotation(rows.shape[1]))
    scales = np.abs(turned).max(-1) / np.float32(127)
    values = np.rint(turned / np.where(scales == 0, np.float32(1), scales)[:, None])
    # A product of scale and 127 can come out a little below the greatest value.
    return (np.clip(values, -127, 127) + 128).astype(np.uint8), scales
