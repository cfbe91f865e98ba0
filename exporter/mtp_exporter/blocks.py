"""Weights as blocks of small integers: which matrices are stored so, and how their values are rounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts.manifest import WeightFormat, WeightFormats
from mtp_exporter.families.description import Claimed, Need
from mtp_exporter.source import Floats, Source, Values
from mtp_plugins.block_weight import BLOCK
from mtp_plugins.block_weight.reference import Bytes, block_weight

FORMATS: tuple[WeightFormat, ...] = ("fp32", "int8", "int4")
_BITS = {"int8": 8, "int4": 4}
_VOCABULARY = ("embedding", "head", "mtp.embedding", "mtp.head")
_WIDE = ("a", "b", "router", "shared_gate")
"""Small matrices that decide: decays and write strengths of a recurrence, which experts a row goes to."""
_SHRINK = (1.0, 0.96, 0.92, 0.88, 0.84)
"""Shares of the range that are tried for a block of 4 bits; the ends of the range may be cut off."""


def bits_of(formats: WeightFormats, need: Need) -> int | None:
    """Bits of a value; None if the tensor stays float32.

    Blocks have matrices of two axes whose columns are a multiple of 32, but for those of `_WIDE`.
    """
    name = need.role.rsplit(".", 1)[-1]
    if len(need.shape) != 2 or need.transform != "none" or need.shape[1] % BLOCK or name in _WIDE:
        return None
    if need.role in _VOCABULARY:
        return _BITS.get(formats.head)
    return _BITS.get(formats.mtp if need.role.startswith("mtp.") else formats.target)


class StoredSource(Source):
    """The values of a checkpoint as a bundle of some formats holds them."""

    def __init__(self, claimed: Claimed, formats: WeightFormats, prefix: str = "") -> None:
        super().__init__(claimed, prefix)
        self._formats = formats

    def below(self, prefix: str) -> StoredSource:
        """The values whose role starts with `prefix`."""
        return StoredSource(self._claimed, self._formats, self._prefix + prefix)

    def rows(self, role: str, start: int, count: int) -> Values:
        """Some entries of the first axis, rounded where the bundle rounds them."""
        values = super().rows(role, start, count)
        bits = bits_of(self._formats, self.need(role))
        return values if bits is None else block_weight(*quantise(values, bits), bits)


def quantise(rows: Floats, bits: int) -> tuple[Bytes, Floats]:
    """uint8[rows, columns / 32, 4 * bits] and float32[rows, columns / 32] for float32[rows, columns].

    Values are rounded to the nearest. With 8 bits a block spans its greatest magnitude. With 4 bits the value of
    greatest magnitude takes the longer side of the range, shares of the range are tried, and each scale is the one of
    least squared error for its integers.
    """
    blocks = rows.reshape(len(rows), -1, BLOCK)
    if bits == 8:
        scales = np.abs(blocks).max(-1) / np.float32(127)
        values = np.rint(blocks / _safe(scales)[..., None]) + 128
        return values.astype(np.uint8), scales
    best, scales = _four_bits(blocks)
    values = (best + 8).astype(np.uint8)
    return values[..., 0::2] | values[..., 1::2] << 4, scales


def _four_bits(blocks: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
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
