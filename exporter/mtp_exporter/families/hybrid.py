"""What hybrids of gated delta layers and gated attention share: sizes, layer kinds, tensors of trunk and head.

Conventions, each with a control in the tests: norm weights are zero-centred (gain 1 + w) except the delta
layer's own norm; q_proj interleaves query and gate per head; the head's projection takes the embedding
first; the head's hidden input is the target's output after the final norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtp_engines.contracts.model import (
    AttentionSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    LayerSpec,
    Mixer,
    Mlp,
    ModelSpec,
    MoeSpec,
    MtpSpec,
    RotarySpec,
)
from mtp_engines.errors import CheckpointError
from mtp_exporter.families.common import attention_heads, default_rotation_only, is_tied, partial_rotary, rotary_base
from mtp_exporter.families.description import Description, Duplicate, Need, Wanted, require_head
from mtp_exporter.families.needs import attention_needs, dense_mlp_needs, moe_needs
from mtp_exporter.families.needs import zero_centred_norm as _norm
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

_VISION = ("model.visual.", "visual.")

DeltaNeeds = Callable[[str, str, GatedDeltaSpec, int], list[Need]]
"""Role, key, mixer, hidden size -> the input projections, which families pack differently."""


@dataclass(frozen=True)
class Layout:
    """What one family of hybrids has of its own."""

    family: str
    prefixes: tuple[str, ...]
    """Where the trunk's tensors may be; the first that fits counts."""
    depth_field: str
    rope_theta: float
    delta_inputs: DeltaNeeds
    mlps: Callable[[Config, int], list[Mlp]]
    """The MLP of each trunk layer, then that of the head."""


def describe_hybrid(checkpoint: Checkpoint, wanted: Wanted, layout: Layout) -> Description:
    """Describe a checkpoint of a hybrid family."""
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    _refuse_variants(config)
    attention, delta = _attention(config, layout), _delta(config)
    hidden, kinds = config.positive("hidden_size"), _layer_kinds(config)
    mixers: dict[str, Mixer] = {"full_attention": attention, "linear_attention": delta}
    prefix = _prefix(checkpoint, layout.prefixes)
    *trunk, last = layout.mlps(config, len(kinds))
    head_layer = LayerSpec(attention, last)
    head_needs = _head_needs(checkpoint, hidden, head_layer)
    mtp_keys = tuple(part.key for need in head_needs for part in need.parts)
    declared = config.text.get(layout.depth_field)
    has_head = wanted.mtp and require_head(
        checkpoint,
        declared,
        lambda depth: () if depth else mtp_keys,
        layout.depth_field,
    )
    tied = is_tied(checkpoint, config)
    spec = ModelSpec(
        family=layout.family,
        hidden_size=hidden,
        vocab_size=config.positive("vocab_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        max_position=config.positive("max_position_embeddings", 32768),
        tied_head=tied,
        layers=tuple(LayerSpec(mixers[kind], mlp) for kind, mlp in zip(kinds, trunk, strict=True)),
        mtp=MtpSpec((head_layer,), hidden) if has_head else None,
    )
    needs = [*_backbone_needs(checkpoint, spec, prefix, layout), *(head_needs if has_head else [])]
    embedding = f"{prefix}embed_tokens.weight"
    twice = (Duplicate("lm_head.weight", embedding),) if tied and "lm_head.weight" in checkpoint.tensors else ()
    _, notes = rotary_base(config, layout.rope_theta)
    ignored = _ignored(checkpoint, needs, wanted.mtp, tied)
    return Description(spec, tuple(needs), ignored, declared, mtp_keys, twice, notes)


def layer_moe(config: Config) -> MoeSpec:
    """Softmax routing with a shared expert behind a gate of its own."""
    experts, top_k = config.positive("num_experts"), config.positive("num_experts_per_tok")
    if top_k > experts:
        raise CheckpointError(
            f"{config.path} has num_experts_per_tok = {top_k} and num_experts = {experts}; a row cannot go to more "
            "experts than there are. Mend the file."
        )
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        intermediate_size=config.positive("moe_intermediate_size"),
        scoring="softmax",
        normalise=bool(config.text.get("norm_topk_prob", True)),
        shared_intermediate_size=config.positive("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _refuse_variants(config: Config) -> None:
    config.fixed("hidden_act", "silu")
    config.fixed("attention_bias", False)
    config.fixed("attn_output_gate", True)
    config.fixed("mtp_use_dedicated_embeddings", False)
    default_rotation_only(config)


def _attention(config: Config, layout: Layout) -> AttentionSpec:
    heads, kv_heads = attention_heads(config)
    head_dim = config.positive("head_dim", 256)
    theta, _ = rotary_base(config, layout.rope_theta)
    rotary = RotarySpec(partial_rotary(config, head_dim, 0.25), theta)
    return AttentionSpec(heads, kv_heads, head_dim, rotary, output_gate=True, qk_norm=True, bias=False)


def _delta(config: Config) -> GatedDeltaSpec:
    keys, values = config.positive("linear_num_key_heads"), config.positive("linear_num_value_heads")
    if values % keys:
        raise CheckpointError(
            f"{config.path} has linear_num_value_heads = {values} and linear_num_key_heads = {keys}; the first must be "
            "a multiple of the second. Mend the file."
        )
    return GatedDeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_head_dim=config.positive("linear_key_head_dim", 128),
        value_head_dim=config.positive("linear_value_head_dim", 128),
        conv_kernel=config.positive("linear_conv_kernel_dim", 4),
    )


def _layer_kinds(config: Config) -> list[str]:
    """`layer_types` where it is given; otherwise layer i is full iff (i + 1) is a multiple of the interval."""
    count = config.positive("num_hidden_layers")
    kinds = config.text.get("layer_types")
    if kinds is None:
        if "full_attention_interval" not in config.text:
            raise CheckpointError(
                f"{config.path} has neither layer_types nor full_attention_interval, so the layers' kinds are unknown. "
                "Add one of them."
            )
        interval = config.positive("full_attention_interval")
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count:
        length = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise CheckpointError(
            f"{config.path} has {length} layer_types for num_hidden_layers = {count}; the two must agree. Mend "
            "the file."
        )
    for index, kind in enumerate(kinds):
        if kind not in ("linear_attention", "full_attention"):
            raise CheckpointError(
                f"{config.path} has layer_types[{index}] = {kind!r}, expected 'linear_attention' or 'full_attention'. "
                "Mend the file, or use a supported checkpoint."
            )
    return [str(kind) for kind in kinds]


def _prefix(checkpoint: Checkpoint, prefixes: tuple[str, ...]) -> str:
    names = [*checkpoint.tensors, *(name for shard in checkpoint.missing for name in shard.tensors)]
    for prefix in prefixes:
        if f"{prefix}embed_tokens.weight" in names:
            return prefix
    for prefix in prefixes:
        if any(name.startswith(f"{prefix}layers.") for name in names):
            return prefix
    places = " and no ".join(f"{prefix}embed_tokens.weight" for prefix in prefixes)
    raise CheckpointError(
        f"{checkpoint.directory} holds no {places} "
        f"among its {len(checkpoint.tensors)} tensors. Use a checkpoint with one of these layouts."
    )


def _layer_needs(
    checkpoint: Checkpoint, role: str, key: str, layer: LayerSpec, hidden: int, inputs: DeltaNeeds | None = None
) -> list[Need]:
    needs = [
        _norm(f"{role}input_norm", f"{key}input_layernorm.weight", hidden),
        _norm(f"{role}post_norm", f"{key}post_attention_layernorm.weight", hidden),
    ]
    if isinstance(layer.mlp, DenseMlpSpec):
        needs += dense_mlp_needs(f"{role}mlp.", f"{key}mlp.", layer.mlp.intermediate_size, hidden)
    else:
        needs += moe_needs(checkpoint, f"{role}mlp.", f"{key}mlp.", layer.mlp, hidden)
    if isinstance(layer.mixer, AttentionSpec):
        return needs + attention_needs(f"{role}mixer.", f"{key}self_attn.", layer.mixer, hidden, _norm)
    assert isinstance(layer.mixer, GatedDeltaSpec) and inputs is not None
    place = (f"{role}mixer.", f"{key}linear_attn.", layer.mixer, hidden)
    return needs + inputs(*place) + _delta_needs(*place)


def _delta_needs(role: str, key: str, mixer: GatedDeltaSpec, hidden: int) -> list[Need]:
    return [
        Need(f"{role}conv", f"{key}conv1d.weight", (mixer.conv_width, 1, mixer.conv_kernel)),
        Need(f"{role}a_log", f"{key}A_log", (mixer.value_heads,)),
        Need(f"{role}dt_bias", f"{key}dt_bias", (mixer.value_heads,)),
        # Plain gain: the one norm of these families that is not zero-centred.
        Need(f"{role}norm", f"{key}norm.weight", (mixer.value_head_dim,)),
        Need(f"{role}output", f"{key}out_proj.weight", (hidden, mixer.value_width)),
    ]


def _backbone_needs(checkpoint: Checkpoint, spec: ModelSpec, prefix: str, layout: Layout) -> list[Need]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    head_key = f"{prefix}embed_tokens.weight" if spec.tied_head else "lm_head.weight"
    needs = [
        Need("embedding", f"{prefix}embed_tokens.weight", (vocab, hidden)),
        _norm("final_norm", f"{prefix}norm.weight", hidden),
        Need("head", head_key, (vocab, hidden)),
    ]
    for index, layer in enumerate(spec.layers):
        place = (f"layers.{index}.", f"{prefix}layers.{index}.")
        needs += _layer_needs(checkpoint, *place, layer, hidden, layout.delta_inputs)
    return needs


def _head_needs(checkpoint: Checkpoint, hidden: int, layer: LayerSpec) -> list[Need]:
    return [
        Need("mtp.projection", "mtp.fc.weight", (hidden, 2 * hidden)),
        _norm("mtp.embedding_norm", "mtp.pre_fc_norm_embedding.weight", hidden),
        _norm("mtp.hidden_norm", "mtp.pre_fc_norm_hidden.weight", hidden),
        _norm("mtp.output_norm", "mtp.norm.weight", hidden),
        *_layer_needs(checkpoint, "mtp.layer.", "mtp.layers.0.", layer, hidden),
    ]


def _ignored(checkpoint: Checkpoint, needs: list[Need], with_mtp: bool, tied: bool) -> dict[str, tuple[str, ...]]:
    used = {part.key for need in needs for part in need.parts}
    groups: dict[str, list[str]] = {}
    for name in sorted(checkpoint.tensors):
        if name in used:
            continue
        if name.startswith(_VISION):
            groups.setdefault("vision tensors (text only)", []).append(name)
        elif name.startswith("mtp.") and not with_mtp:
            groups.setdefault("tensors of the MTP head (--no-mtp)", []).append(name)
        elif name == "lm_head.weight" and tied:
            groups.setdefault("tensors equal to the tied embedding", []).append(name)
    return {reason: tuple(names) for reason, names in groups.items()}
