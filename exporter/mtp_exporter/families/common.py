"""Readings of a configuration that several families share."""

from __future__ import annotations

import math
from typing import Any

from mtp_engines.contracts.model import RopeScaling
from mtp_engines.errors import CheckpointError
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config


def is_tied(checkpoint: Checkpoint, config: Config) -> bool:
    """Whether embedding and vocabulary head are one matrix.

    Raises:
        CheckpointError: there is no head, and no flag says that the embedding serves as one.
    """
    flagged = config.flag("tie_word_embeddings")
    if not checkpoint.names("lm_head.weight"):
        # Without an embedding either, the names are others than expected, which the claim of tensors tells better.
        embeddings = (name for name in checkpoint.tensors if name.endswith("embed_tokens.weight"))
        if not flagged and any(".layers." not in name for name in embeddings):
            raise CheckpointError(
                f"{checkpoint.directory} holds no 'lm_head.weight', and neither level of config.json sets "
                "tie_word_embeddings. Set it if embedding and head are one matrix, or restore the tensor."
            )
        return flagged
    # With the flag set, the two must be one matrix: a build reads both and refuses if they differ.
    return flagged


def default_rotation_only(config: Config) -> None:
    """Refuse scaled rotary positions.

    Raises:
        CheckpointError: names the place and the kind of scaling.
    """
    group, kind, _ = _rope_group(config)
    if kind != "default":
        raise CheckpointError(
            f"{config.path} has {group} with rope_type {kind!r}; only 'default' is supported for this family. "
            "Remove the scaling to build for the context the model was trained on."
        )


def rope_scaling(config: Config) -> RopeScaling | None:
    """The scaling of rotary frequencies, None for plain ones.

    Raises:
        CheckpointError: the kind is unknown, or one of its fields is missing.
    """
    group, kind, rope = _rope_group(config)
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            f"{config.path} has {group} with rope_type {kind!r}; 'default', 'linear', 'llama3' and 'yarn' are "
            "supported. Remove the scaling to build for the context the model was trained on."
        )
    factor = _rope_number(config, group, rope, "factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    trained = rope.get("original_max_position_embeddings") or config.text.get("original_max_position_embeddings")
    original = int(trained or config.positive("max_position_embeddings"))
    if kind == "llama3":
        low, high = (_rope_number(config, group, rope, name) for name in ("low_freq_factor", "high_freq_factor"))
        return RopeScaling("llama3", factor, original, low, high)
    slow, fast = (_rope_number(config, group, rope, *pair) for pair in (("beta_slow", 1.0), ("beta_fast", 32.0)))
    truncate = bool(rope.get("truncate", True))
    return RopeScaling("yarn", factor, original, slow, fast, _yarn_magnitude(rope, factor), truncate)


def yarn_scale(config: Config) -> float:
    """The factor that yarn puts on the scores of latent attention: (0.1 mscale_all_dim ln(factor) + 1)^2."""
    _, kind, rope = _rope_group(config)
    every = rope.get("mscale_all_dim")
    return _mscale(float(rope["factor"]), float(every)) ** 2 if kind == "yarn" and every else 1.0


def _rope_group(config: Config) -> tuple[str, str, dict[str, Any]]:
    """Name of the group of rotary fields, its rope_type, and its fields; the first group that scales wins."""
    found: tuple[str, str, dict[str, Any]] = ("rope_parameters", "default", {})
    for group in ("rope_parameters", "rope_scaling"):
        rope = config.text.get(group)
        if isinstance(rope, dict):
            kind = str(rope.get("rope_type", rope.get("type", "default")))
            if kind != "default":
                return group, kind, rope
    return found


def _rope_number(config: Config, group: str, rope: dict[str, Any], name: str, default: float | None = None) -> float:
    value = rope.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise CheckpointError(
            f"{config.path} has {group}.{name} = {value!r}, expected a positive number. Mend the file."
        )
    return float(value)


def _yarn_magnitude(rope: dict[str, Any], factor: float) -> float:
    """What yarn multiplies cosines and sines by (YaRN, arXiv 2309.00071, with DeepSeek's two exponents)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scale, every = rope.get("mscale"), rope.get("mscale_all_dim")
    if scale and every:
        return _mscale(factor, float(scale)) / _mscale(factor, float(every))
    return _mscale(factor, 1.0)


def _mscale(factor: float, exponent: float) -> float:
    return 0.1 * exponent * math.log(factor) + 1.0 if factor > 1 else 1.0


def attention_heads(config: Config) -> tuple[int, int]:
    """Query heads and key-value heads.

    Raises:
        CheckpointError: the first is no multiple of the second.
    """
    heads = config.positive("num_attention_heads")
    kv_heads = config.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.path} has num_attention_heads = {heads} and num_key_value_heads = {kv_heads}; the first must be "
            "a multiple of the second. Mend the file."
        )
    return heads, kv_heads


def belongs(checkpoint: Checkpoint, model_types: tuple[str, ...], architectures: tuple[str, ...]) -> bool:
    """Whether model_type and architectures are a family's: separate drafts carry the model_type of their target."""
    given = checkpoint.config.get("architectures")
    known = not given or (isinstance(given, list) and all(name in architectures for name in given))
    return known and checkpoint.config.get("model_type") in model_types


def rotary_base(config: Config, default: float) -> tuple[float, tuple[str, ...]]:
    """rope_theta, and a note if none is named and the default is taken."""
    theta = config.rope("rope_theta")
    if theta is not None:
        return theta, ()
    return default, (f"config.json names no rope_theta; the family's {default:.0f} is used",)


def partial_rotary(config: Config, head_dim: int, default: float) -> int:
    """Dimensions of a head that rotate.

    Raises:
        CheckpointError: not an even number of them.
    """
    factor = config.rope("partial_rotary_factor")
    rotary = int(head_dim * (default if factor is None else factor))
    if rotary < 2 or rotary % 2 or rotary > head_dim:
        raise CheckpointError(
            f"{config.path} makes {rotary} of {head_dim} head dimensions rotary, expected an even number of them. "
            "Mend partial_rotary_factor or head_dim."
        )
    return rotary
