"""Read MiMo, Llama, Qwen2 and Qwen3 checkpoints and EAGLE drafts into float64 arrays."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.dense_rope import Rope, load_rope
from tests.oracles.float64_checkpoint import Array, Weights, load_tensors, subset

TARGETS = ("llama", "mimo", "qwen2", "qwen3")
MIMO_PREFIX = "mtp_layers."
LAYER_NAMES = (
    r"(input|post_attention)_layernorm\.weight",
    r"self_attn\.[qkvo]_proj\.(weight|bias)",
    r"self_attn\.[qk]_norm\.weight",
    r"mlp\.(gate|up|down)_proj\.weight",
)
LAYER = "(" + "|".join(LAYER_NAMES) + ")"
TARGET_NAMES = rf"embed_tokens\.weight|norm\.weight|layers\.\d+\.{LAYER}"
MIMO_NAMES = rf"{LAYER}|(token|hidden|final)_layernorm\.weight|input_proj\.weight"
EAGLE_NAMES = {
    "eagle": rf"fc\.(weight|bias)|embed_tokens\.weight|lm_head\.weight|layers\.0\.{LAYER}",
    "eagle3": r"fc\.(weight|bias)|embed_tokens\.weight|lm_head\.weight|norm\.weight|d2t|t2d"
    rf"|midlayer\.({LAYER}|hidden_norm\.weight)",
}


# Variants of EAGLE that change the equations; a draft that asks for one is not run without it.
EAGLE_VARIANTS = (
    "add_para_norm",
    "eh_proj_before_attn",
    "fc_norm",
    "norm_before_fc",
    "norm_output",
    "return_hidden_post_norm",
    "use_aux_norm",
)


@dataclass(frozen=True)
class DenseConfig:
    """The fields that the equations of a dense layer use."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Every layer attends to all rows before it."""
        return ("full_attention",) * self.num_hidden_layers


@dataclass(frozen=True)
class Head:
    """What drafts.

    kind: "mimo", "eagle" or "eagle3". config: of its layer.
    depths: the tensors of every depth, named without their prefix; EAGLE has one.
    embedding: float64[vocab_size, hidden_size], the target's or its own.
    lm_head: float64[rows, hidden_size]; rows is smaller than vocab_size for EAGLE-3 with a table.
    token_offsets: int64[rows], target id minus row; None where a row is its id.
    taps: the target's layers whose input EAGLE-3 reads; num_hidden_layers is the last output.
    norm_before_residual: EAGLE-3's residual stream starts at the normed row.
    """

    kind: str
    config: DenseConfig
    depths: tuple[Weights, ...]
    embedding: Array
    lm_head: Array
    token_offsets: Array | None = None
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False


@dataclass(frozen=True)
class DenseCheckpoint:
    """Everything the oracle needs.

    target: names without `model.`, e.g. `layers.0.mlp.up_proj.weight`.
    lm_head: float64[vocab_size, hidden_size], the embedding when the checkpoint is tied.
    head: None when the files hold none and no draft was given.
    eos: union of generation_config.json and config.json, ascending.
    """

    config: DenseConfig
    target: Weights
    lm_head: Array
    head: Head | None
    eos: tuple[int, ...]


def load_dense_checkpoint(directory: str | Path, draft: str | Path | None = None) -> DenseCheckpoint:
    """Read a target and what drafts for it: its own MiMo head, or the EAGLE draft at `draft`.

    Raises:
        ValueError: the configuration or the tensors have no single meaning.
        OSError: a file that must be there is not.
    """
    directory = Path(directory)
    fields = _read_json(directory / "config.json")
    if fields.get("model_type") not in TARGETS:
        raise ValueError(f"model_type is {fields.get('model_type')!r}; the oracle knows {TARGETS}.")
    tensors = {name: array.astype(np.float64) for name, array in load_tensors(directory).items()}
    config = load_dense_config(fields)
    target = subset(tensors, "model.")
    mimo = {name: target.pop(name) for name in list(target) if name.startswith(MIMO_PREFIX)}
    outside = [name for name in tensors if not name.startswith("model.") and name != "lm_head.weight"]
    _refuse_unknown([*target, *outside], TARGET_NAMES)
    lm_head = _lm_head(tensors, fields)
    head = _mimo_head(mimo, fields, config, target, lm_head)
    if draft is not None:
        if head is not None:
            raise ValueError(f"{directory} has a head of its own and cannot have the draft {draft} too.")
        head = _eagle_head(Path(draft), config, target, lm_head)
    return DenseCheckpoint(config, target, lm_head, head, _eos(directory, fields))


def load_dense_config(fields: Mapping[str, Any]) -> DenseConfig:
    """The configuration of a target or of a draft's layer."""
    if fields.get("use_sliding_window") or "sliding_attention" in (fields.get("layer_types") or ()):
        raise ValueError("The oracle knows no sliding windows.")
    if fields.get("hidden_act", "silu") != "silu" or fields.get("mlp_bias"):
        raise ValueError("The oracle knows only MLPs with SiLU and without biases.")
    heads = int(fields["num_attention_heads"])
    head_dim = int(fields.get("head_dim") or int(fields["hidden_size"]) // heads)
    return DenseConfig(
        hidden_size=int(fields["hidden_size"]),
        intermediate_size=int(fields["intermediate_size"]),
        vocab_size=int(fields["vocab_size"]),
        num_hidden_layers=int(fields["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        rms_norm_eps=float(fields["rms_norm_eps"]),
        rope=load_rope(fields, head_dim),
    )


def _mimo_head(
    tensors: Weights, fields: Mapping[str, Any], config: DenseConfig, target: Weights, lm_head: Array
) -> Head | None:
    if not tensors:
        return None
    found = sorted({int(name.split(".")[1]) for name in tensors})
    declared = fields.get("num_nextn_predict_layers")
    if found != list(range(len(found))) or declared not in (None, len(found)):
        raise ValueError(f"The files hold the depths {found}, num_nextn_predict_layers is {declared}.")
    depths = tuple(subset(tensors, f"{MIMO_PREFIX}{k}.") for k in found)
    for weights in depths:
        _refuse_unknown(weights, MIMO_NAMES)
    return Head("mimo", config, depths, target["embed_tokens.weight"], lm_head)


def _eagle_head(directory: Path, target_config: DenseConfig, target: Weights, target_head: Array) -> Head:
    fields = _read_json(directory / "config.json")
    stored = load_tensors(directory)
    kind = "eagle3" if "midlayer.self_attn.q_proj.weight" in stored else "eagle"
    _refuse_unknown(stored, EAGLE_NAMES[kind])
    variants = [name for name in EAGLE_VARIANTS if _either(fields, name)]
    if variants or _either(fields, "use_aux_hidden_state") is False:
        raise ValueError(f"The oracle knows no drafts with {variants or 'use_aux_hidden_state false'}.")
    weights = {name: array.astype(np.float64) for name, array in stored.items() if name not in ("d2t", "t2d")}
    config = load_dense_config(fields)
    if config.num_hidden_layers != 1 or config.vocab_size != target_config.vocab_size:
        raise ValueError("The oracle knows drafts of one layer that speak the target's vocabulary.")
    embedding = weights.pop("embed_tokens.weight", target["embed_tokens.weight"])
    head = weights.pop("lm_head.weight", target_head)
    if {embedding.shape[1], head.shape[1]} != {config.hidden_size}:
        raise ValueError("A draft of another width than the target's needs its own embedding and output head.")
    if kind == "eagle":
        if "layers.0.input_layernorm.weight" in weights or config.hidden_size != target_config.hidden_size:
            raise ValueError("An EAGLE-1 draft has the target's width and no input norm.")
        return Head(kind, config, (_flat(weights, "layers.0."),), embedding, head)
    offsets = stored.get("d2t")
    rows = int(fields.get("draft_vocab_size") or config.vocab_size)
    if len(head) != rows or (offsets is None and rows != config.vocab_size):
        raise ValueError(f"The draft's head has {len(head)} rows for {rows} ids, and d2t is {offsets}.")
    return Head(
        kind,
        config,
        (_flat(weights, "midlayer."),),
        embedding,
        head,
        token_offsets=offsets,
        taps=_taps(fields, target_config.num_hidden_layers),
        norm_before_residual=bool(_either(fields, "norm_before_residual")),
    )


def _flat(weights: Weights, prefix: str) -> Weights:
    """The layer's tensors beside the others, without their prefix."""
    return {name.removeprefix(prefix): array for name, array in weights.items()}


def _taps(fields: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Indices of layers whose input EAGLE-3 reads.

    The same field counts differently in its two places: in `eagle_config`, which the trainers of
    SGLang's drafts write, k is the output of layer k; at the top level, which the converters for
    vLLM write, k is the input of layer k.
    """
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    flat = fields.get("eagle_aux_hidden_state_layer_ids")
    found = {tuple(i + 1 for i in nested)} if nested else set()
    found |= {tuple(flat)} if flat else set()
    if not found:
        found = {(2, layers // 2, layers - 3)}
    if len(found) > 1:
        raise ValueError(f"The configuration names the layers {sorted(found)}, counted as inputs.")
    taps = found.pop()
    if not all(0 <= i <= layers for i in taps):
        raise ValueError(f"The draft reads the layer inputs {taps}, the target has {layers} layers.")
    return taps


def _either(fields: Mapping[str, Any], name: str) -> Any:
    """A field of the top level or of `eagle_config`; both must agree."""
    places = (fields, fields.get("eagle_config") or {})
    found = [place[name] for place in places if place.get(name) is not None]
    if len(set(found)) > 1:
        raise ValueError(f"{name} is {found} in the two places that hold it.")
    return found[0] if found else None


def _refuse_unknown(names: Any, pattern: str) -> None:
    unknown = sorted(name for name in names if not re.fullmatch(pattern, name))
    if unknown:
        raise ValueError(f"The oracle would ignore {unknown}.")


def _lm_head(tensors: Weights, fields: Mapping[str, Any]) -> Array:
    embedding = tensors["model.embed_tokens.weight"]
    stored = tensors.get("lm_head.weight")
    if stored is None:
        if not fields.get("tie_word_embeddings"):
            raise ValueError("There is no lm_head.weight, and tie_word_embeddings does not excuse it.")
        return embedding
    if fields.get("tie_word_embeddings") and not np.array_equal(stored, embedding):
        raise ValueError("tie_word_embeddings is true, but lm_head.weight is not the embedding.")
    return stored


def _eos(directory: Path, fields: Mapping[str, Any]) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    ids: set[int] = set()
    for place in (_read_json(path) if path.exists() else {}, fields):
        value = place.get("eos_token_id")
        ids |= {value} if isinstance(value, int) else set(value or ())
    return tuple(sorted(ids))


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
