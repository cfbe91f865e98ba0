"""Plain decoders without an MTP head: Llama, Qwen2 and Qwen3 dense; they draft by prompt lookup.

One layout with three differences: Qwen2 has biases on query, key and value; Qwen3 norms each query and key
head; Llama has neither. All norms have plain gains and every head dimension rotates.
"""

from __future__ import annotations

from mtp_engines.contracts.model import AttentionSpec, LayerSpec, ModelSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.checkpoint import Checkpoint
from mtp_exporter.config import Config
from mtp_exporter.families.common import attention_heads, default_rotation_only, is_tied
from mtp_exporter.families.description import Description, Need, refuse_packed

MODEL_TYPES = ("llama", "qwen2", "qwen3")
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_THETA = 10_000.0
"""What the reference implementation assumes when no place names a base."""


def describe(checkpoint: Checkpoint, with_mtp: bool) -> Description:
    """Describe a plain decoder; `with_mtp` changes nothing, since there is no head."""
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    refuse_packed(checkpoint, ())
    _refuse_variants(config)
    kind = checkpoint.config["model_type"]
    heads, kv_heads = attention_heads(config)
    hidden = config.positive("hidden_size")
    head_dim = config.positive("head_dim", max(hidden // heads, 1))
    theta = config.rope("rope_theta") or _ROPE_THETA
    mixer = AttentionSpec(
        heads, kv_heads, head_dim, head_dim, theta, output_gate=False, qk_norm=kind == "qwen3", bias=kind == "qwen2"
    )
    layer = LayerSpec(mixer, config.positive("intermediate_size"))
    tied = is_tied(checkpoint, config)
    spec = ModelSpec(
        family="plain_decoder",
        hidden_size=hidden,
        vocab_size=config.positive("vocab_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        max_position=config.positive("max_position_embeddings", 2048),
        tied_head=tied,
        layers=(layer,) * config.positive("num_hidden_layers"),
        mtp=None,
    )
    has_head = "lm_head.weight" in checkpoint.tensors
    twice = (("lm_head.weight", "model.embed_tokens.weight"),) if tied and has_head else ()
    ignored: dict[str, tuple[str, ...]] = {"tensors equal to the tied embedding": ("lm_head.weight",)} if twice else {}
    if stored := tuple(name for name in checkpoint.tensors if name.endswith(".rotary_emb.inv_freq")):
        ignored["stored rotary frequencies, which follow from rope_theta"] = stored
    assumed = f"config.json names no rope_theta; the default of {_ROPE_THETA:.0f} is used"
    notes = () if config.rope("rope_theta") else (assumed,)
    return Description(spec, tuple(_needs(spec)), ignored, None, (), twice, notes)


def _refuse_variants(config: Config) -> None:
    config.fixed("hidden_act", "silu")
    config.fixed("attention_bias", False)
    config.fixed("mlp_bias", False)
    config.fixed("use_sliding_window", False)
    default_rotation_only(config)
    kinds = config.text.get("layer_types") or []
    other = next((kind for kind in kinds if kind != "full_attention"), None)
    if other is not None:
        raise CheckpointError(
            f"{config.path} has layer_types with {other!r}; only 'full_attention' is supported for this family. Use "
            "another checkpoint."
        )


def _needs(spec: ModelSpec) -> list[Need]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    needs = [
        Need("embedding", "model.embed_tokens.weight", (vocab, hidden)),
        Need("final_norm", "model.norm.weight", (hidden,)),
        Need("head", "model.embed_tokens.weight" if spec.tied_head else "lm_head.weight", (vocab, hidden)),
    ]
    for index, layer in enumerate(spec.layers):
        needs += _layer_needs(f"layers.{index}.", f"model.layers.{index}.", layer, hidden)
    return needs


def _layer_needs(role: str, key: str, layer: LayerSpec, hidden: int) -> list[Need]:
    mixer, size = layer.mixer, layer.intermediate_size
    assert isinstance(mixer, AttentionSpec)
    widths = {"query": mixer.query_width, "key": mixer.kv_width, "value": mixer.kv_width}
    needs = [
        Need(f"{role}input_norm", f"{key}input_layernorm.weight", (hidden,)),
        Need(f"{role}post_norm", f"{key}post_attention_layernorm.weight", (hidden,)),
        Need(f"{role}mlp.gate", f"{key}mlp.gate_proj.weight", (size, hidden)),
        Need(f"{role}mlp.up", f"{key}mlp.up_proj.weight", (size, hidden)),
        Need(f"{role}mlp.down", f"{key}mlp.down_proj.weight", (hidden, size)),
        Need(f"{role}mixer.output", f"{key}self_attn.o_proj.weight", (hidden, mixer.query_width)),
    ]
    for name, width in widths.items():
        projection = f"{key}self_attn.{name[0]}_proj"
        needs.append(Need(f"{role}mixer.{name}", f"{projection}.weight", (width, hidden)))
        if mixer.bias:
            needs.append(Need(f"{role}mixer.{name}_bias", f"{projection}.bias", (width,)))
    if mixer.qk_norm:
        for name in ("query", "key"):
            needs.append(Need(f"{role}mixer.{name}_norm", f"{key}self_attn.{name[0]}_norm.weight", (mixer.head_dim,)))
    return needs
