"""Frequencies of rotary embeddings in float64, from the RoPE fields of a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles.float64_checkpoint import Array


@dataclass(frozen=True)
class Rope:
    """Rotations of one model.

    frequencies: float64[head_dim / 2], angle per position. scale: factor of cosine and sine.
    unscaled: the frequencies without scaling, for the control that ignores it.
    """

    frequencies: Array
    scale: float
    unscaled: Array


def load_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Read RoPE from `rope_parameters`, or from `rope_theta` and `rope_scaling` beside it.

    Raises:
        ValueError: the kind is unknown, or the fields have no single meaning.
    """
    places = [dict(place) for place in (config.get("rope_parameters"), config.get("rope_scaling")) if place]
    if len(places) > 1:
        raise ValueError("RoPE stands both in rope_parameters and in rope_scaling.")
    fields = places[0] if places else {}
    bases = {float(place["rope_theta"]) for place in (fields, config) if place.get("rope_theta") is not None}
    if len(bases) != 1:
        raise ValueError(f"rope_theta must have one value, the configuration has {sorted(bases)}.")
    if {fields.get("partial_rotary_factor"), config.get("partial_rotary_factor")} - {None, 1.0}:
        raise ValueError("The oracle knows only RoPE over the whole head.")
    theta = bases.pop()
    kind = fields.get("rope_type", fields.get("type", "default"))
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if kind == "default":
        return Rope(plain, 1.0, plain)
    if kind == "linear":
        return Rope(plain / float(fields["factor"]), 1.0, plain)
    longest = float(config["max_position_embeddings"])
    original = float(
        config.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings") or longest
    )
    if kind == "llama3":
        return Rope(_llama3(plain, fields, original), 1.0, plain)
    if kind == "yarn":
        factor = float(fields["factor"]) if fields.get("factor") is not None else longest / original
        return Rope(_yarn(plain, fields, original, factor, theta, head_dim), _yarn_scale(fields, factor), plain)
    raise ValueError(f"The oracle does not know the RoPE type {kind!r}.")


def _llama3(plain: Array, fields: Mapping[str, Any], original: float) -> Array:
    """Short wavelengths stay, long ones are divided by the factor, those between are mixed."""
    low, high, factor = (float(fields[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    # How often a wave fits into the original length: `high` times or more is short, `low` is long.
    turns = original * plain / (2.0 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (kept + (1.0 - kept) / factor)


def _yarn(
    plain: Array, fields: Mapping[str, Any], original: float, factor: float, theta: float, head_dim: int
) -> Array:
    """A ramp over the pairs, from those that turn beta_fast times to those that turn beta_slow."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    first = pair_of(float(fields.get("beta_fast") or 32))
    last = pair_of(float(fields.get("beta_slow") or 1))
    if fields.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    divided = np.clip((np.arange(head_dim // 2) - first) / (last - first), 0.0, 1.0)
    return plain * (1.0 - divided) + plain / factor * divided


def _yarn_scale(fields: Mapping[str, Any], factor: float) -> float:
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return scale(float(fields["mscale"])) / scale(float(fields["mscale_all_dim"]))
    return scale(1.0)
