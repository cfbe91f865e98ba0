"""DeepSeek-V3 and R1: latent attention, experts routed by groups, the head stored as the layer after the last."""

from __future__ import annotations

from mtp_engines.contracts.model import LatentAttentionSpec, RotarySpec
from mtp_exporter.families.common import belongs, rope_scaling, rotary_base, yarn_scale
from mtp_exporter.families.description import Description, Need, Wanted
from mtp_exporter.families.needs import latent_attention_needs
from mtp_exporter.families.stacked_head import Layout, describe_stacked
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

MODEL_TYPES = ("deepseek_v3",)
ARCHITECTURES = ("DeepseekV3ForCausalLM",)
_ROPE_THETA = 10_000.0
_LATENT_EPSILON = 1e-6
"""The published model fixes it for the norms inside the attention, whatever rms_norm_eps says."""


def recognises(checkpoint: Checkpoint) -> bool:
    """By model_type and architectures."""
    return belongs(checkpoint, MODEL_TYPES, ARCHITECTURES)


def describe(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Describe a DeepSeek-V3 checkpoint."""
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    config.fixed("hidden_act", "silu")
    config.fixed("moe_layer_freq", 1)
    theta, notes = rotary_base(config, _ROPE_THETA)
    key_dim, rotary_dim = config.positive("qk_nope_head_dim"), config.positive("qk_rope_head_dim")
    mixer = LatentAttentionSpec(
        num_heads=config.positive("num_attention_heads"),
        query_rank=config.positive("q_lora_rank") if config.text.get("q_lora_rank") is not None else None,
        latent_dim=config.positive("kv_lora_rank"),
        key_dim=key_dim,
        value_dim=config.positive("v_head_dim"),
        rotary=RotarySpec(rotary_dim, theta, bool(config.text.get("rope_interleave", True)), rope_scaling(config)),
        scale=(key_dim + rotary_dim) ** -0.5 * yarn_scale(config),
        norm_epsilon=_LATENT_EPSILON,
        bias=bool(config.text.get("attention_bias", False)),
    )
    hidden = config.positive("hidden_size")

    def mixer_needs(role: str, key: str) -> list[Need]:
        return latent_attention_needs(role, key, mixer, hidden)

    epsilon, positions = config.number("rms_norm_eps", 1e-6), config.positive("max_position_embeddings", 4096)
    return describe_stacked(
        checkpoint, config, wanted, Layout("deepseek_v3", mixer, mixer_needs, epsilon, positions, notes)
    )
