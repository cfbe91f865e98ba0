"""Read Qwen3-Next, Qwen3.5 MoE, DeepSeek-V3 and GLM-4.5 directories into float64 arrays.

Whatever the layout, the trunk's tensors come out without a prefix, a head as a `Head`, and a sparse
layer's experts as three stacks, `mlp.experts.{gate,up,down}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.float64_checkpoint import Array, TextConfig, Weights, load_tensors, subset

FAMILIES = ("qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm4_moe")
# The longer prefix first: "model." is a prefix of every name of the nested layout.
PREFIXES = ("model.language_model.", "model.")
QWEN_HEAD_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
LAYER_HEAD_NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@dataclass(frozen=True)
class Routing:
    """How a token finds its experts.

    biased: scores are sigmoids, and a bias that is no part of the weights helps to choose; if not,
        scores are a softmax over all experts.
    groups, chosen_groups: experts are chosen from the best groups only. scaling: of the weights.
    """

    experts: int
    per_token: int
    biased: bool
    renormalised: bool
    groups: int = 1
    chosen_groups: int = 1
    scaling: float = 1.0


@dataclass(frozen=True)
class Grouped:
    """Sizes of attention whose query heads share key heads."""

    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    qk_norm: bool


@dataclass(frozen=True)
class Latent:
    """Sizes of attention over one latent row a position; query_rank is None for one matrix."""

    heads: int
    nope: int
    rotated: int
    value: int
    rank: int
    query_rank: int | None


@dataclass(frozen=True)
class FamilyConfig:
    """The fields that the equations use.

    sparse: for every trunk layer, whether it has experts. text: all of the language model's fields.
    """

    family: str
    layer_types: tuple[str, ...]
    sparse: tuple[bool, ...]
    rms_norm_eps: float
    attention: TextConfig | Grouped | Latent
    routing: Routing
    text: Mapping[str, Any]

    @property
    def zero_centred(self) -> bool:
        """Norms store their distance from 1."""
        return self.family.startswith("qwen")


@dataclass(frozen=True)
class Head:
    """An MTP head: what is around its decoder layer, the layer, and what it embeds and scores with."""

    embedding_gain: Array
    hidden_gain: Array
    projection: Array
    output_gain: Array
    layer: Weights
    embedding: Array
    lm_head: Array


@dataclass(frozen=True)
class FamilyCheckpoint:
    """Everything the oracle needs; head is None when the files hold none."""

    config: FamilyConfig
    target: Weights
    lm_head: Array
    head: Head | None
    eos: tuple[int, ...]


def load_family_checkpoint(directory: str | Path) -> FamilyCheckpoint:
    """Read config, weights and end tokens of a checkpoint directory.

    Raises:
        ValueError: the family is another one, or it has an option that the oracle does not know.
        KeyError: a tensor or field that must be there is not.
        OSError: a file that must be there is not.
    """
    directory = Path(directory)
    top = _read_json(directory / "config.json")
    text = top.get("text_config", top)
    config = config_from_json(text)
    tensors = {name: array.astype(np.float64) for name, array in load_tensors(directory).items()}
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in tensors), None)
    if prefix is None:
        raise ValueError(f"No embed_tokens.weight under any of {PREFIXES}.")
    layers = len(config.layer_types)
    head_layer = f"{prefix}layers.{layers}."
    inside = not config.zero_centred
    trunk = {name: array for name, array in tensors.items() if not (inside and name.startswith(head_layer))}
    target = _stacked(subset(trunk, prefix), config.routing.experts)
    embedding = target["embed_tokens.weight"]
    tied = top.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False)
    lm_head = embedding if tied else tensors["lm_head.weight"]
    found = subset(tensors, head_layer if inside else "mtp.")
    head = _head(_stacked(found, config.routing.experts), inside, embedding, lm_head) if found else None
    return FamilyCheckpoint(config, target, lm_head, head, _eos(directory, top, text))


def config_from_json(text: Mapping[str, Any]) -> FamilyConfig:
    """The equations' fields from those of a language model."""
    family = text["model_type"].removesuffix("_text")
    if family not in FAMILIES:
        raise ValueError(f"model_type is {text['model_type']!r}; the oracle knows {FAMILIES}.")
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError("The oracle knows only the activation silu.")
    if text.get("attention_bias", False) and family != "glm4_moe":
        raise ValueError(f"The oracle knows no attention biases in {family}.")
    attention: TextConfig | Grouped | Latent
    if family == "deepseek_v3":
        kinds, attention = ("latent_attention",) * text["num_hidden_layers"], _latent(text)
    elif family == "glm4_moe":
        kinds, attention = ("full_attention",) * text["num_hidden_layers"], _grouped(text)
    else:
        kinds = _layer_types(text)
        attention = _gated(text, kinds)
    return FamilyConfig(
        family=family,
        layer_types=kinds,
        sparse=tuple(_is_sparse(family, text, i) for i in range(len(kinds))),
        rms_norm_eps=float(text["rms_norm_eps"]),
        attention=attention,
        routing=_routing(family, text),
        text=text,
    )


def rope_field(name: str, text: Mapping[str, Any], default: float | None = None) -> float:
    """One RoPE number, which releases put in three places; all that hold it must agree."""
    places = (text.get("rope_parameters"), text, text.get("rope_scaling"))
    found = {float(place[name]) for place in places if place and place.get(name) is not None}
    if not found and default is not None:
        return default
    if len(found) != 1:
        raise ValueError(f"{name} must have one value, the configuration has {sorted(found)}.")
    return found.pop()


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _routing(family: str, text: Mapping[str, Any]) -> Routing:
    if family in ("deepseek_v3", "glm4_moe"):
        return Routing(
            experts=text["n_routed_experts"],
            per_token=text["num_experts_per_tok"],
            biased=True,
            renormalised=text["norm_topk_prob"],
            groups=text["n_group"],
            chosen_groups=text["topk_group"],
            scaling=float(text["routed_scaling_factor"]),
        )
    # Qwen3.5 has no field for it and always does.
    renormalised = text.get("norm_topk_prob", True) if family == "qwen3_next" else True
    return Routing(text["num_experts"], text["num_experts_per_tok"], False, renormalised)


def _is_sparse(family: str, text: Mapping[str, Any], layer: int) -> bool:
    if family in ("deepseek_v3", "glm4_moe"):
        return layer >= text["first_k_dense_replace"]
    if family == "qwen3_5_moe":
        return True
    listed = layer in (text.get("mlp_only_layers") or ())
    return not listed and (layer + 1) % text.get("decoder_sparse_step", 1) == 0


def _latent(text: Mapping[str, Any]) -> Latent:
    return Latent(
        heads=text["num_attention_heads"],
        nope=text["qk_nope_head_dim"],
        rotated=text["qk_rope_head_dim"],
        value=text["v_head_dim"],
        rank=text["kv_lora_rank"],
        query_rank=text["q_lora_rank"],
    )


def _grouped(text: Mapping[str, Any]) -> Grouped:
    dim = text["head_dim"]
    factor = rope_field("partial_rotary_factor", text, default=0.5)
    return Grouped(
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"],
        head_dim=dim,
        rotated=int(dim * factor),
        qk_norm=text.get("use_qk_norm", False),
    )


def _gated(text: Mapping[str, Any], kinds: tuple[str, ...]) -> TextConfig:
    if not text.get("attn_output_gate", True):
        raise ValueError("The oracle knows only gated attention in the Qwen families.")
    special = {
        "intermediate_size": int(text.get("intermediate_size", 0)),
        "layer_types": kinds,
        "rms_norm_eps": float(text["rms_norm_eps"]),
        "rope_theta": rope_field("rope_theta", text),
        "partial_rotary_factor": rope_field("partial_rotary_factor", text, default=0.25),
    }
    copied = {name: int(text[name]) for name in TextConfig.__dataclass_fields__ if name not in special}
    return TextConfig(**copied, **special)


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    if text.get("layer_types"):
        return tuple(text["layer_types"])
    interval = text.get("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    return tuple(kinds[(i + 1) % interval == 0] for i in range(text["num_hidden_layers"]))


def _stacked(tensors: Weights, experts: int) -> Weights:
    """Replace every layer's experts, fused or single, by three stacks."""
    marker = "mlp.experts."
    stacked = {name: array for name, array in tensors.items() if marker not in name}
    for prefix in {name.split(marker)[0] + marker for name in tensors if marker in name}:
        if f"{prefix}gate_up_proj" in tensors:
            gate, up = np.split(tensors[f"{prefix}gate_up_proj"], 2, axis=1)
            stacks = {"gate": gate, "up": up, "down": tensors[f"{prefix}down_proj"]}
        else:
            stacks = {
                kind: np.stack([tensors[f"{prefix}{expert}.{kind}_proj.weight"] for expert in range(experts)])
                for kind in ("gate", "up", "down")
            }
        stacked |= {prefix + kind: stack for kind, stack in stacks.items()}
    return stacked


def _head(tensors: Weights, inside: bool, embedding: Array, lm_head: Array) -> Head:
    """The head from its own tensors; what it has no own copy of is the trunk's."""
    names = LAYER_HEAD_NAMES if inside else QWEN_HEAD_NAMES
    embedding_gain, hidden_gain, projection, output_gain = (tensors[f"{name}.weight"] for name in names)
    return Head(
        embedding_gain,
        hidden_gain,
        projection,
        output_gain,
        layer=tensors if inside else subset(tensors, "layers.0."),
        embedding=tensors.get("embed_tokens.weight", embedding),
        lm_head=tensors.get("shared_head.head.weight", lm_head),
    )


def _eos(directory: Path, top: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    ids: set[int] = set()
    for place in (generation, top, text):
        value = place.get("eos_token_id")
        ids |= {value} if isinstance(value, int) else set(value or ())
    return tuple(sorted(ids))
