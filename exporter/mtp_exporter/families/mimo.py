"""MiMo: a Qwen2 trunk, heads under model.mtp_layers.{depth} that take the hidden state first.

The head was trained on the residual stream before the final norm, as its publisher's serving code feeds it;
fine-tunes of the head that were trained on the state after the norm need `Wanted.hidden_tap`.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_engines.contracts.model import LayerSpec, MtpSpec
from mtp_exporter.families.common import belongs
from mtp_exporter.families.dense import (
    dense_layer,
    dense_layer_needs,
    dense_needs,
    dense_spec,
    full_attention_only,
    left_out,
)
from mtp_exporter.families.description import Description, Need, Wanted, require_head
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

MODEL_TYPES = ("mimo",)
ARCHITECTURES = ("MiMoForCausalLM",)
_FIELD = "num_nextn_predict_layers"
_MOST_DEPTHS = 8


def recognises(checkpoint: Checkpoint) -> bool:
    """By model_type and architectures."""
    return belongs(checkpoint, MODEL_TYPES, ARCHITECTURES)


def describe(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Describe a MiMo checkpoint."""
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    full_attention_only(config)
    layer, notes = dense_layer(config, qk_norm=False, bias=bool(config.text.get("attention_bias", True)))
    spec = dense_spec(checkpoint, config, "mimo", layer)
    hidden, declared = spec.hidden_size, config.text.get(_FIELD)
    keys = [
        tuple(part.key for need in _head_needs(d, layer, hidden) for part in need.parts)
        for d in range(_MOST_DEPTHS + 1)
    ]
    depths = require_head(checkpoint, declared, keys.__getitem__, _FIELD, _MOST_DEPTHS) if wanted.mtp else 0
    needs = dense_needs(spec) + [need for depth in range(depths) for need in _head_needs(depth, layer, hidden)]
    if depths:
        mtp = MtpSpec((layer,) * depths, hidden, concat="hidden_first", taps=(len(spec.layers),))
        spec = replace(spec, mtp=mtp)
    mtp_keys = tuple(key for of_depth in keys[: max(depths, 1)] for key in of_depth)
    ignored, twice = left_out(checkpoint, spec)
    heads = tuple(name for name in checkpoint.tensors if name.startswith("model.mtp_layers."))
    if heads and not wanted.mtp:
        ignored["tensors of the MTP head (--no-mtp)"] = heads
    return Description(spec, tuple(needs), ignored, declared, mtp_keys, twice, notes)


def _head_needs(depth: int, layer: LayerSpec, hidden: int) -> list[Need]:
    role, key = f"mtp.{depth}." if depth else "mtp.", f"model.mtp_layers.{depth}."
    return [
        Need(f"{role}embedding_norm", f"{key}token_layernorm.weight", (hidden,)),
        Need(f"{role}hidden_norm", f"{key}hidden_layernorm.weight", (hidden,)),
        Need(f"{role}projection", f"{key}input_proj.weight", (hidden, 2 * hidden)),
        Need(f"{role}output_norm", f"{key}final_layernorm.weight", (hidden,)),
        *dense_layer_needs(f"{role}layer.", key, layer, hidden),
    ]
