"""Rounding matrices to blocks of 4 bits, in the form of `mtp_plugins.block_weight`."""

from __future__ import annotations

import numpy as np

from mtp_exporter.reading.source import Floats
from mtp_exporter.storing.parallel import in_parts
from mtp_plugins.block_weight import USED
from mtp_plugins.block_weight.reference import Bytes, turned, turning

_SHARES = (0.95, 0.88)
"""Shares of the range that are tried for a block: its ends are cut off."""
_SHIFTS = (-0.3, 0.0, 0.3)
"""Where the middle of the range may lie, in steps from the middle of the integers."""
_GREATEST = 15
_CHUNK = 1 << 16
"""Values that stay in a processor's cache while they are turned and rounded."""


def block_count(columns: int) -> int:
    """Blocks of a row."""
    return -(-columns // USED)


def four_bits(rows: Floats) -> tuple[Bytes, Floats]:
    """uint8[rows, count, 32] and float32[rows, count] for float32[rows, columns].

    Values are turned and rounded to the nearest of 16 steps over the range of their block, each scale is the one of
    least squared error for its integers, and the best of a few ranges is kept. Where a range lies makes no difference
    to a product, so nothing is kept of that.
    """
    count, columns = rows.shape
    by, step = turning(), max(_CHUNK // columns, 1)
    blocks = np.empty((count, block_count(columns), len(by[0]) // 2), np.uint8)
    scales = np.empty(blocks.shape[:2], np.float32)

    def round_rows(part: slice) -> None:
        values, scales[part] = _fitted(turned(rows[part], by))
        blocks[part] = values[..., 0::2] | values[..., 1::2] << 4

    in_parts(count, step, round_rows)
    return blocks, scales


def _fitted(runs: Floats) -> tuple[Bytes, Floats]:
    """Integers and scale of each of float32[..., 64], whose entries sum to zero."""
    least, greatest = runs.min(-1), runs.max(-1)
    reach = _safe((greatest - least) / np.float32(_GREATEST))
    # In steps of the whole range, so that no square overflows.
    best, middle = _Best(runs / reach[..., None]), (greatest / 2 + least / 2) / reach
    for share in _SHARES:
        for shift in _SHIFTS:
            best.offer(np.full_like(reach, share), np.float32(_GREATEST / 2 + shift) - middle / np.float32(share))
    # Once more with the scale that was fitted, and the offset at which the integers' mean stands for zero.
    best.offer(_safe(best.scales), best.integers.mean(-1, dtype=np.float32))
    return best.integers, best.scales * reach


class _Best:
    """The integers and scales of least squared error among those that were offered."""

    def __init__(self, runs: Floats) -> None:
        self._runs = runs
        self._explained = np.full(runs.shape[:-1], -1, np.float32)
        self.integers = np.zeros(runs.shape, np.uint8)
        self.scales = np.zeros(runs.shape[:-1], np.float32)

    def offer(self, steps: Floats, offsets: Floats) -> None:
        """Round to steps float32[...] with zero at offsets float32[...]."""
        integers = self._runs / steps[..., None]
        integers += offsets[..., None]
        np.rint(integers, out=integers)
        np.clip(integers, 0, _GREATEST, out=integers)
        # A product sees what is left of the integers without their mean.
        centred = integers - integers.mean(-1, keepdims=True)
        squares, products = _safe(np.square(centred).sum(-1)), (self._runs * centred).sum(-1)
        scales = products / squares
        # The squared error of the best scale is what this leaves of the squares of the values.
        explained = scales * products
        better = explained > self._explained
        self._explained = np.where(better, explained, self._explained)
        self.scales = np.where(better, scales, self.scales)
        np.copyto(self.integers, integers, where=better[..., None], casting="unsafe")


def _safe(values: Floats) -> Floats:
    """1 in the place of 0, for blocks of equal values."""
    return np.where(values == 0, np.float32(1), values)
