"""Qwen3.5 dense and MoE (and 3.6, 3.8 under the same model_type): four projections in front of a delta layer."""

from __future__ import annotations

from mtp_engines.contracts.model import DenseMlpSpec, GatedDeltaSpec, Mlp
from mtp_exporter.families.common import belongs
from mtp_exporter.families.description import Description, Need, Wanted
from mtp_exporter.families.hybrid import Layout, describe_hybrid, layer_moe
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
ARCHITECTURES = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
)


def recognises(checkpoint: Checkpoint) -> bool:
    """By model_type and architectures."""
    return belongs(checkpoint, MODEL_TYPES, ARCHITECTURES)


def describe(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Describe a Qwen3.5 checkpoint."""
    return describe_hybrid(checkpoint, wanted, _LAYOUT)


def _mlps(config: Config, layers: int) -> list[Mlp]:
    if "moe" in str(config.top.get("model_type")):
        config.fixed("norm_topk_prob", True)
        return [layer_moe(config)] * (layers + 1)
    config.fixed("mlp_only_layers", [])
    return [DenseMlpSpec(config.positive("intermediate_size"))] * (layers + 1)


def _delta_inputs(role: str, key: str, mixer: GatedDeltaSpec, hidden: int) -> list[Need]:
    return [
        Need(f"{role}query_key_value", f"{key}in_proj_qkv.weight", (mixer.conv_width, hidden)),
        Need(f"{role}gate", f"{key}in_proj_z.weight", (mixer.value_width, hidden)),
        Need(f"{role}b", f"{key}in_proj_b.weight", (mixer.value_heads, hidden)),
        Need(f"{role}a", f"{key}in_proj_a.weight", (mixer.value_heads, hidden)),
    ]


_LAYOUT = Layout(
    family="qwen3_5",
    prefixes=("model.language_model.", "model."),
    depth_field="mtp_num_hidden_layers",
    rope_theta=10_000_000.0,
    delta_inputs=_delta_inputs,
    mlps=_mlps,
)
