"""Rounding matrices to 8 bits, in the form of `mtp_plugins.rotated_weight`."""

from __future__ import annotations

import numpy as np

from mtp_exporter.reading.source import Floats
from mtp_exporter.storing.parallel import in_parts
from mtp_plugins.rotated_weight.reference import Bytes, rotate, rotated_weight, rotation

_CHUNK = 1 << 18
"""Values that stay in a processor's cache while they are turned and rounded: seven times as fast as a whole matrix."""
_STRIPE = 16
"""Rows that are transposed at once, for the same reason."""


def eight_bits(rows: Floats) -> tuple[Bytes, Floats]:
    """uint8[rows, columns] and float32[rows] for float32[rows, columns], every row on its own.

    A rotated row spans its greatest magnitude; values are rounded to the nearest.
    """
    count, columns = rows.shape
    by, step = rotation(columns), max(_CHUNK // columns, 1)
    values, scales = np.empty(rows.shape, np.uint8), np.empty(count, np.float32)

    def round_rows(part: slice) -> None:
        turned = rotate(rows[part], by)
        greatest = np.maximum(turned.max(-1), -turned.min(-1))
        steps = greatest / np.float32(127)
        turned /= np.where(steps == 0, np.float32(1), steps)[:, None]
        np.rint(turned, out=turned)
        # A product of scale and 127 can come out a little below the greatest value.
        np.clip(turned, -127, 127, out=turned)
        turned += np.float32(128)
        values[part] = turned
        scales[part] = steps

    in_parts(count, step, round_rows)
    return values, scales


def widened(values: Bytes, scales: Floats) -> Floats:
    """float32[rows, columns], what the integers of `eight_bits` stand for."""
    count, columns = values.shape
    by, step = rotation(columns), max(_CHUNK // columns, 1)
    wide = np.empty(values.shape, np.float32)

    def widen(part: slice) -> None:
        wide[part] = rotated_weight(values[part].T, scales[part], by)

    in_parts(count, step, widen)
    return wide


def transposed(values: Bytes) -> Bytes:
    """uint8[columns, rows], contiguous, for uint8[rows, columns]."""
    turned = np.empty(values.shape[::-1], np.uint8)
    for start in range(0, len(values), _STRIPE):
        turned[:, start : start + _STRIPE] = values[start : start + _STRIPE].T
    return turned
