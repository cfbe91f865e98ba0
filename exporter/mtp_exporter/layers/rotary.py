"""Rotary tables: cosine and sine of every position, with the frequencies that a model's scaling asks for."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mtp_engines.contracts.model import RopeScaling, RotarySpec

Doubles = npt.NDArray[np.float64]


def rotary_tables(rotary: RotarySpec, positions: int) -> tuple[Doubles, Doubles]:
    """cos and sin of position * frequency, float64[positions, dim / 2]."""
    magnitude = rotary.scaling.magnitude if rotary.scaling else 1.0
    angles = np.arange(positions)[:, None] * frequencies(rotary)
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def frequencies(rotary: RotarySpec) -> Doubles:
    """theta^(-2i / dim), scaled; float64[dim / 2]."""
    plain: Doubles = rotary.theta ** (-np.arange(0, rotary.dim, 2, dtype=np.float64) / rotary.dim)
    scaling = rotary.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    kept = _llama3_share(plain, scaling) if scaling.kind == "llama3" else _yarn_share(rotary, scaling)
    return np.asarray(kept * plain + (1 - kept) * plain / scaling.factor)


def _llama3_share(plain: Doubles, scaling: RopeScaling) -> Doubles:
    """How much of a frequency stays: 1 for short waves, 0 for long ones, linear in 1 / wavelength between."""
    waves = 2 * math.pi / plain
    share = (scaling.original_positions / waves - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    return np.asarray(np.clip(share, 0, 1))


def _yarn_share(rotary: RotarySpec, scaling: RopeScaling) -> Doubles:
    """How much of a frequency stays, linear in the dimension between two numbers of rotations (arXiv 2309.00071)."""

    def dimension(rotations: float) -> float:
        ratio = scaling.original_positions / (rotations * 2 * math.pi)
        return rotary.dim * math.log(ratio) / (2 * math.log(rotary.theta))

    low, high = dimension(scaling.high_factor), dimension(scaling.low_factor)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    width = high - low if high != low else 1e-3
    return np.asarray(1 - np.clip((np.arange(rotary.dim // 2) - low) / width, 0, 1))
