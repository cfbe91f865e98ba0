"""Read a Qwen3.5 dense checkpoint directory into float64 arrays, whatever its layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors needs
import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray
Weights = dict[str, Array]

# The longer prefix first: "model." is a prefix of every name of the nested layout.
PREFIXES = ("model.language_model.", "model.")
LAYER_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class TextConfig:
    """The fields of the language model that its equations use."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float


@dataclass(frozen=True)
class Checkpoint:
    """Everything the oracle needs.

    target: names without the layout's prefix, e.g. `layers.0.mlp.up_proj.weight`.
    lm_head: float64[vocab_size, hidden_size], the embedding when the checkpoint is tied.
    head: the `mtp.*` tensors without `mtp.`; None when the files hold none.
    eos: union of generation_config.json, the top level and text_config, ascending.
    """

    config: TextConfig
    target: Weights
    lm_head: Array
    head: Weights | None
    eos: tuple[int, ...]


def load_checkpoint(directory: str | Path) -> Checkpoint:
    """Read config, weights and end tokens of a checkpoint directory.

    Raises:
        ValueError: the configuration or the tensors have no single meaning.
        OSError: a file that must be there is not.
    """
    directory = Path(directory)
    top = _read_json(directory / "config.json")
    text = top.get("text_config", top)
    tensors = {name: array.astype(np.float64) for name, array in load_tensors(directory).items()}
    target = _target_from_tensors(tensors)
    head = {name[4:]: array for name, array in tensors.items() if name.startswith("mtp.")}
    return Checkpoint(
        config=_config_from_json(top, text),
        target=target,
        lm_head=_lm_head(tensors, target["embed_tokens.weight"], top, text),
        head=head or None,
        eos=_eos(directory, top, text),
    )


def load_tensors(directory: Path) -> Weights:
    """All tensors in their stored dtype; an index alone decides which files count."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_json(index)["weight_map"]
        shards = {name: load_file(directory / name) for name in sorted(set(weight_map.values()))}
        return {name: shards[shard][name] for name, shard in weight_map.items()}
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if len(files) != 1:
        raise ValueError(f"{directory} has no index and {len(files)} safetensors files, not 1.")
    return load_file(files[0])


def subset(weights: Weights, prefix: str) -> Weights:
    """The tensors under `prefix`, named without it."""
    return {name[len(prefix) :]: array for name, array in weights.items() if name.startswith(prefix)}


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _config_from_json(top: Mapping[str, Any], text: Mapping[str, Any]) -> TextConfig:
    if not text.get("attn_output_gate", True) or text.get("attention_bias", False):
        raise ValueError("The oracle knows only gated attention without biases.")
    if text.get("num_experts"):
        raise ValueError("The oracle knows only dense MLPs; the configuration has experts.")
    copied = [
        name
        for name in TextConfig.__dataclass_fields__
        if name not in ("layer_types", "rms_norm_eps", "rope_theta", "partial_rotary_factor")
    ]
    return TextConfig(
        **{name: int(text[name]) for name in copied},
        layer_types=_layer_types(text),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_field("rope_theta", text),
        partial_rotary_factor=_rope_field("partial_rotary_factor", text, default=0.25),
    )


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    layers = int(text["num_hidden_layers"])
    if text.get("layer_types") is not None:
        kinds = tuple(text["layer_types"])
    else:
        interval = int(text["full_attention_interval"])
        if interval < 1:
            raise ValueError(f"full_attention_interval is {interval}, it must be at least 1.")
        kinds = tuple(LAYER_KINDS[(i + 1) % interval == 0] for i in range(layers))
    if len(kinds) != layers or not set(kinds) <= set(LAYER_KINDS):
        raise ValueError(f"layer_types {kinds} does not describe {layers} layers.")
    return kinds


def _rope_field(name: str, text: Mapping[str, Any], default: float | None = None) -> float:
    """One RoPE number, which releases put in three places; all that hold it must agree."""
    places = (text.get("rope_parameters"), text, text.get("rope_scaling"))
    found = {float(place[name]) for place in places if place and place.get(name) is not None}
    if not found and default is not None:
        return default
    if len(found) != 1:
        raise ValueError(f"{name} must have one value, the configuration has {sorted(found)}.")
    return found.pop()


def _target_from_tensors(tensors: Weights) -> Weights:
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in tensors:
            return subset(tensors, prefix)
    raise ValueError(f"No embed_tokens.weight under any of {PREFIXES}.")


def _lm_head(tensors: Weights, embedding: Array, top: Mapping[str, Any], text: Mapping[str, Any]) -> Array:
    """The output head; the flag may stand at either level, and a missing tensor means tied."""
    stored = tensors.get("lm_head.weight")
    if stored is None:
        return embedding
    tied = top.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    if tied and not np.array_equal(stored, embedding):
        raise ValueError("tie_word_embeddings is true, but lm_head.weight is not the embedding.")
    return stored


def _eos(directory: Path, top: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    ids: set[int] = set()
    for place in (generation, top, text):
        value = place.get("eos_token_id")
        ids |= {value} if isinstance(value, int) else set(value or ())
    return tuple(sorted(ids))
