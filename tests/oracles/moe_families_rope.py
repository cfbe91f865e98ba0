"""Rotations of queries and keys by position in float64, stretched contexts included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles.float64_checkpoint import Array
from tests.oracles.moe_families_checkpoint import FamilyConfig, Grouped, Latent, rope_field


@dataclass(frozen=True)
class Rope:
    """A rotation: radians a position for every pair, and a factor on all of what is rotated.

    interleaved: pair i is (2i, 2i + 1), and stays there; if not, (i, i + half).
    """

    frequencies: Array
    factor: float = 1.0
    interleaved: bool = False


def grouped_rope(config: FamilyConfig, broken: str | None) -> Rope:
    """Part of every head, in halves."""
    sizes = config.attention
    assert isinstance(sizes, Grouped)
    rotated = sizes.head_dim if broken == "rope_full" else sizes.rotated
    return Rope(_frequencies(rope_field("rope_theta", config.text), rotated), interleaved=broken == "rope_interleaved")


def latent_rope(config: FamilyConfig, broken: str | None) -> Rope:
    """All of the rotated part, in neighbouring pairs unless the configuration says otherwise."""
    sizes = config.attention
    assert isinstance(sizes, Latent)
    interleaved = config.text.get("rope_interleave", True) and broken != "rope_half_split"
    theta, scaling = rope_field("rope_theta", config.text), _yarn(config.text)
    if scaling is None:
        return Rope(_frequencies(theta, sizes.rotated), 1.0, interleaved)
    frequencies = _stretched(theta, sizes.rotated, scaling)
    if broken == "yarn_ignored":
        frequencies = _frequencies(theta, sizes.rotated)
    return Rope(frequencies, 1.0 if broken == "yarn_factor_ignored" else _yarn_factor(scaling), interleaved)


def latent_scale(config: FamilyConfig, broken: str | None) -> float:
    """What scores are multiplied by; a stretched context makes it larger."""
    sizes = config.attention
    assert isinstance(sizes, Latent)
    scale = (sizes.nope + (0 if broken == "scale_of_nope" else sizes.rotated)) ** -0.5
    scaling = _yarn(config.text)
    if scaling is None or broken == "mscale_ignored":
        return scale
    # Once for the query and once for the key.
    mscale = _mscale(scaling["factor"], scaling.get("mscale_all_dim") or 0.0)
    return scale * (mscale if broken == "mscale_once" else mscale**2)


def rotate(rows: Array, positions: Array, rope: Rope) -> Array:
    """Rotate the leading part of the last axis of float64[T, heads, dim]."""
    half = len(rope.frequencies)
    angle = positions[:, None, None] * rope.frequencies
    turn = rope.factor * np.exp(1j * angle)
    turned, rest = rows[..., : 2 * half], rows[..., 2 * half :]
    if rope.interleaved:
        pairs = (turned[..., 0::2] + 1j * turned[..., 1::2]) * turn
        turned = np.stack([pairs.real, pairs.imag], axis=-1).reshape(turned.shape)
    else:
        pairs = (turned[..., :half] + 1j * turned[..., half:]) * turn
        turned = np.concatenate([pairs.real, pairs.imag], axis=-1)
    return np.concatenate([turned, rest], axis=-1)


def _yarn(text: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The scaling of a context stretched by YaRN, or None; its original length is filled in."""
    scaling = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise ValueError(f"The oracle knows no RoPE scaling of type {kind!r}.")
    return {"original_max_position_embeddings": text["max_position_embeddings"], **scaling}


def _frequencies(theta: float, rotated: int) -> Array:
    return theta ** (-np.arange(0, rotated, 2) / rotated)


def _stretched(theta: float, rotated: int, scaling: Mapping[str, Any]) -> Array:
    """Frequencies that are divided by the factor where a pair turns slowly, and kept where fast."""
    length = scaling["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        """The pair, as a real number, that turns so often within the original length."""
        return rotated * np.log(length / (2 * np.pi * times)) / (2 * np.log(theta))

    low = pair_that_turns(scaling.get("beta_fast") or 32)
    high = pair_that_turns(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, rotated - 1.0)
    width = high - low if high != low else 0.001
    slow = np.clip((np.arange(rotated // 2) - low) / width, 0.0, 1.0)
    plain = _frequencies(theta, rotated)
    return plain * (1.0 - slow) + plain / scaling["factor"] * slow


def _yarn_factor(scaling: Mapping[str, Any]) -> float:
    """The factor on cosine and sine."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    first, second = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if first and second:
        return _mscale(scaling["factor"], first) / _mscale(scaling["factor"], second)
    return _mscale(scaling["factor"], 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * float(np.log(factor)) + 1.0
