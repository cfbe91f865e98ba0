"""Rounding matrices to blocks of 4 bits, in the form of `mtp_plugins.block_weight`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_exporter.reading.source import Floats
from mtp_plugins.block_weight import BLOCK
from mtp_plugins.block_weight.reference import Bytes

_SHRINK = (1.0, 0.96, 0.92, 0.88, 0.84)
"""Shares of the range that are tried for a block; the ends of the range may be cut off."""


def four_bits(rows: Floats) -> tuple[Bytes, Floats]:
    """uint8[rows, columns / 32, 16] and float32[rows, columns / 32] for float32[rows, columns].

    Values are rounded to the nearest. The value of greatest magnitude takes the longer side of the range, shares of the
    range are tried, and each scale is the one of least squared error for its integers.
    """
    best, scales = _fitted(rows.reshape(len(rows), -1, BLOCK))
    values = (best + 8).astype(np.uint8)
    return (values[..., 0::2] | values[..., 1::2] << 4).astype(np.uint8), scales


def _fitted(blocks: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    place = np.abs(blocks).argmax(-1, keepdims=True)
    ends = np.take_along_axis(blocks, place, -1)[..., 0] / np.float32(-8)
    best = np.zeros(blocks.shape, np.int8)
    scales = np.zeros(blocks.shape[:-1], np.float32)
    least = np.full(blocks.shape[:-1], np.inf, np.float32)
    for share in _SHRINK:
        integers = np.clip(np.rint(blocks / _safe(ends * np.float32(share))[..., None]), -8, 7)
        squares = (integers * integers).sum(-1)
        fitted = (blocks * integers).sum(-1) / np.where(squares == 0, np.float32(1), squares)
        error = np.square(blocks - integers * fitted[..., None]).sum(-1)
        better = error < least
        least = np.where(better, error, least)
        scales = np.where(better, fitted, scales)
        best = np.where(better[..., None], integers, best).astype(np.int8)
    return best, scales


def _safe(scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """1 in the place of 0, for blocks of zeros."""
    return np.where(scales == 0, np.float32(1), scales)
