"""What dense decoders with plain norms share: attention, MLP, embedding and head under the usual names."""

from __future__ import annotations

from mtp_engines.contracts.model import AttentionSpec, DenseMlpSpec, LayerSpec, ModelSpec, RotarySpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.families.common import attention_heads, is_tied, partial_rotary, rope_scaling, rotary_base
from mtp_exporter.families.description import Duplicate, Need
from mtp_exporter.families.needs import attention_needs, dense_mlp_needs
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

_ROPE_THETA = 10_000.0
"""What the reference implementation assumes when no place names a base."""


def dense_layer(config: Config, *, qk_norm: bool, bias: bool) -> tuple[LayerSpec, tuple[str, ...]]:
    """The one kind of layer of such a model, and notes on what was assumed."""
    heads, kv_heads = attention_heads(config)
    head_dim = config.positive("head_dim", max(config.positive("hidden_size") // heads, 1))
    theta, notes = rotary_base(config, _ROPE_THETA)
    rotary = RotarySpec(partial_rotary(config, head_dim, 1.0), theta, scaling=rope_scaling(config))
    mixer = AttentionSpec(heads, kv_heads, head_dim, rotary, output_gate=False, qk_norm=qk_norm, bias=bias)
    return LayerSpec(mixer, DenseMlpSpec(config.positive("intermediate_size"))), notes


def dense_spec(checkpoint: Checkpoint, config: Config, family: str, layer: LayerSpec) -> ModelSpec:
    """A target of `num_hidden_layers` such layers, without a draft head."""
    return ModelSpec(
        family=family,
        hidden_size=config.positive("hidden_size"),
        vocab_size=config.positive("vocab_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        max_position=config.positive("max_position_embeddings", 2048),
        tied_head=is_tied(checkpoint, config),
        layers=(layer,) * config.positive("num_hidden_layers"),
        mtp=None,
    )


def dense_needs(spec: ModelSpec) -> list[Need]:
    """Every tensor of the target."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    needs = [
        Need("embedding", "model.embed_tokens.weight", (vocab, hidden)),
        Need("final_norm", "model.norm.weight", (hidden,)),
        Need("head", "model.embed_tokens.weight" if spec.tied_head else "lm_head.weight", (vocab, hidden)),
    ]
    for index, layer in enumerate(spec.layers):
        needs += dense_layer_needs(f"layers.{index}.", f"model.layers.{index}.", layer, hidden)
    return needs


def dense_layer_needs(role: str, key: str, layer: LayerSpec, hidden: int) -> list[Need]:
    """Every tensor of one layer."""
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.mlp, DenseMlpSpec)
    norms = [Need(f"{role}post_norm", f"{key}post_attention_layernorm.weight", (hidden,))]
    if layer.input_norm:
        norms.append(Need(f"{role}input_norm", f"{key}input_layernorm.weight", (hidden,)))
    return [
        *norms,
        *dense_mlp_needs(f"{role}mlp.", f"{key}mlp.", layer.mlp.intermediate_size, hidden),
        *attention_needs(f"{role}mixer.", f"{key}self_attn.", layer.mixer, hidden),
    ]


def left_out(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[dict[str, tuple[str, ...]], tuple[Duplicate, ...]]:
    """Tensors that the graphs do not need, by reason, and the copy of a tied embedding."""
    twice = spec.tied_head and "lm_head.weight" in checkpoint.tensors
    ignored: dict[str, tuple[str, ...]] = {"tensors equal to the tied embedding": ("lm_head.weight",)} if twice else {}
    if stored := tuple(name for name in checkpoint.tensors if name.endswith(".rotary_emb.inv_freq")):
        ignored["stored rotary frequencies, which follow from rope_theta"] = stored
    return ignored, (Duplicate("lm_head.weight", "model.embed_tokens.weight"),) if twice else ()


def full_attention_only(config: Config) -> None:
    """Refuse what such a decoder does not do.

    Raises:
        CheckpointError: names the field.
    """
    config.fixed("hidden_act", "silu")
    config.fixed("mlp_bias", False)
    config.fixed("use_sliding_window", False)
    kinds = config.text.get("layer_types") or []
    other = next((kind for kind in kinds if kind != "full_attention"), None)
    if other is not None:
        raise CheckpointError(
            f"{config.path} has layer_types with {other!r}; only 'full_attention' is supported for this family. Use "
            "another checkpoint."
        )
