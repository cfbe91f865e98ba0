"""GLM-4.5: grouped-query attention with partial rotation, routed experts, the head stored as a layer."""

from __future__ import annotations

from mtp_engines.contracts.model import AttentionSpec, RotarySpec
from mtp_exporter.families.common import attention_heads, belongs, partial_rotary, rope_scaling, rotary_base
from mtp_exporter.families.description import Description, Need, Wanted
from mtp_exporter.families.needs import attention_needs
from mtp_exporter.families.stacked_head import Layout, describe_stacked
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

MODEL_TYPES = ("glm4_moe",)
ARCHITECTURES = ("Glm4MoeForCausalLM",)
_ROPE_THETA = 10_000.0


def recognises(checkpoint: Checkpoint) -> bool:
    """By model_type and architectures."""
    return belongs(checkpoint, MODEL_TYPES, ARCHITECTURES)


def describe(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Describe a GLM-4.5 checkpoint."""
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    config.fixed("hidden_act", "silu")
    hidden = config.positive("hidden_size")
    heads, kv_heads = attention_heads(config)
    head_dim = config.positive("head_dim", max(hidden // heads, 1))
    theta, notes = rotary_base(config, _ROPE_THETA)
    mixer = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        RotarySpec(partial_rotary(config, head_dim, 0.5), theta, scaling=rope_scaling(config)),
        output_gate=False,
        qk_norm=bool(config.text.get("use_qk_norm", False)),
        bias=bool(config.text.get("attention_bias", False)),
    )

    def mixer_needs(role: str, key: str) -> list[Need]:
        return attention_needs(role, key, mixer, hidden)

    epsilon, positions = config.number("rms_norm_eps", 1e-5), config.positive("max_position_embeddings", 131072)
    return describe_stacked(
        checkpoint, config, wanted, Layout("glm4_moe", mixer, mixer_needs, epsilon, positions, notes)
    )
