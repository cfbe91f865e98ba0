"""EAGLE-1 drafts: one Llama layer over a projection of embedding and hidden state, in a directory of its own.

No norm touches the inputs, the layer has no input norm, and its output is both what the target's vocabulary
head consumes and what a chained step takes back.
"""

from __future__ import annotations

from dataclasses import replace

from mtp_engines.contracts.model import ModelSpec, MtpSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.families.dense import dense_layer, dense_layer_needs, full_attention_only
from mtp_exporter.families.description import Draft, Need
from mtp_exporter.families.drafts import draft_vocabulary, has_any, prefix_of
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config


def recognises(checkpoint: Checkpoint) -> bool:
    """By its tensors: layer 0 without a final norm, and a projection or, if that was lost, nothing but that layer."""
    prefix = prefix_of(checkpoint)
    if checkpoint.names(f"{prefix}norm.weight") or not has_any(checkpoint, f"{prefix}layers.0."):
        return False
    alone = checkpoint.config.get("num_hidden_layers") == 1 and not checkpoint.names("lm_head.weight")
    return checkpoint.names(f"{prefix}fc.weight") or (alone and not has_any(checkpoint, f"{prefix}layers.1."))


def describe_draft(checkpoint: Checkpoint, target: ModelSpec) -> Draft:
    """Describe an EAGLE-1 draft of a target.

    Raises:
        CheckpointError: it was made for a target of another width or vocabulary.
    """
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    hidden = config.positive("hidden_size")
    if hidden != target.hidden_size:
        raise CheckpointError(
            f"{checkpoint.directory} drafts for targets of hidden size {hidden}, the target has {target.hidden_size}. "
            "Name the draft that was trained for this target."
        )
    full_attention_only(config)
    config.fixed("add_para_norm", False)
    config.fixed("num_hidden_layers", 1)
    prefix = prefix_of(checkpoint)
    bias = checkpoint.names(f"{prefix}layers.0.self_attn.q_proj.bias")
    layer, notes = dense_layer(config, qk_norm=False, bias=bias)
    normed = checkpoint.names(f"{prefix}layers.0.input_layernorm.weight")
    layer = replace(layer, input_norm=normed)
    vocabulary = draft_vocabulary(checkpoint, config, target, prefix)
    mtp = MtpSpec(
        (layer,),
        hidden,
        kind="eagle",
        input_norms=False,
        join_bias=checkpoint.names(f"{prefix}fc.bias"),
        output_norm=False,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        **vocabulary.fields,
    )
    needs = [Need("mtp.projection", f"{prefix}fc.weight", (hidden, 2 * hidden))]
    if mtp.join_bias:
        needs.append(Need("mtp.projection_bias", f"{prefix}fc.bias", (hidden,)))
    needs += dense_layer_needs("mtp.layer.", f"{prefix}layers.0.", layer, hidden)
    return Draft(mtp, (*needs, *vocabulary.needs), vocabulary.ignored, notes)
