"""Plain decoders without an MTP head: Llama, Qwen2 and Qwen3 dense; they draft by lookup or with a separate draft.

One layout with three differences: Qwen2 has biases on query, key and value; Qwen3 norms each query and key
head; Llama has neither. All norms have plain gains.
"""

from __future__ import annotations

from mtp_exporter.families.common import belongs
from mtp_exporter.families.dense import dense_layer, dense_needs, dense_spec, full_attention_only, left_out
from mtp_exporter.families.description import Description, Wanted
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def recognises(checkpoint: Checkpoint) -> bool:
    """By model_type and architectures."""
    return belongs(checkpoint, MODEL_TYPES, ARCHITECTURES)


def describe(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Describe a plain decoder; it has no head to want."""
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    full_attention_only(config)
    config.fixed("attention_bias", False)
    kind = checkpoint.config["model_type"]
    layer, notes = dense_layer(config, qk_norm=kind == "qwen3", bias=kind == "qwen2")
    spec = dense_spec(checkpoint, config, "plain_decoder", layer)
    ignored, twice = left_out(checkpoint, spec)
    return Description(spec, tuple(dense_needs(spec)), ignored, None, (), twice, notes)
