"""Qwen3.5 dense (and 3.6, 3.8 under the same model_type): gated delta layers, gated attention, one MTP layer.

Conventions, each with a control in the tests: norm weights are zero-centred (gain 1 + w) except the
delta layer's own norm; q_proj interleaves query and gate per head; the head's projection takes the
embedding first; the head's hidden input is the target's output after the final norm.
"""

from __future__ import annotations

from mtp_engines.contracts.model import AttentionSpec, GatedDeltaSpec, LayerSpec, Mixer, ModelSpec, MtpSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.checkpoint import Checkpoint
from mtp_exporter.config import Config
from mtp_exporter.families.common import default_rotation_only, is_tied
from mtp_exporter.families.description import Description, Need, refuse_packed, require_head

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
_PREFIXES = ("model.language_model.", "model.")
_VISION = ("model.visual.", "visual.")
_ROPE_THETA = 10_000_000.0
"""The family's published base, used (and said so) when no place names one."""


def describe(checkpoint: Checkpoint, with_mtp: bool) -> Description:
    """Describe a Qwen3.5 checkpoint; `with_mtp` False leaves its head out on purpose."""
    config = Config(checkpoint.config, str(checkpoint.directory / "config.json"))
    refuse_packed(checkpoint, (*_VISION, *(() if with_mtp else ("mtp.",))))
    _refuse_variants(config)
    attention, delta = _attention(config), _delta(config)
    hidden, intermediate = config.positive("hidden_size"), config.positive("intermediate_size")
    kinds = _layer_kinds(config)
    mixers: dict[str, Mixer] = {"full_attention": attention, "linear_attention": delta}
    prefix = _prefix(checkpoint)
    head_needs = list(_head_needs(hidden, LayerSpec(attention, intermediate)))
    mtp_keys = tuple(need.key for need in head_needs)
    declared = config.text.get("mtp_num_hidden_layers")
    has_head = with_mtp and require_head(checkpoint, declared, mtp_keys, "mtp_num_hidden_layers")
    tied = is_tied(checkpoint, config)
    spec = ModelSpec(
        family="qwen3_5",
        hidden_size=hidden,
        vocab_size=config.positive("vocab_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        max_position=config.positive("max_position_embeddings", 32768),
        tied_head=tied,
        layers=tuple(LayerSpec(mixers[kind], intermediate) for kind in kinds),
        mtp=MtpSpec(LayerSpec(attention, intermediate)) if has_head else None,
    )
    needs = [*_backbone_needs(spec, prefix), *(head_needs if has_head else [])]
    assumed = f"config.json names no rope_theta; the family's {_ROPE_THETA:.0f} is used"
    embedding = f"{prefix}embed_tokens.weight"
    twice = (("lm_head.weight", embedding),) if tied and "lm_head.weight" in checkpoint.tensors else ()
    notes = () if config.rope("rope_theta") else (assumed,)
    return Description(
        spec, tuple(needs), _ignored(checkpoint, needs, with_mtp, tied), declared, mtp_keys, twice, notes
    )


def _refuse_variants(config: Config) -> None:
    config.fixed("hidden_act", "silu")
    config.fixed("attention_bias", False)
    config.fixed("attn_output_gate", True)
    config.fixed("mtp_use_dedicated_embeddings", False)
    config.fixed("mlp_only_layers", [])
    default_rotation_only(config)


def _attention(config: Config) -> AttentionSpec:
    heads, head_dim = config.positive("num_attention_heads"), config.positive("head_dim", 256)
    kv_heads = config.positive("num_key_value_heads")
    if heads % kv_heads:
        raise CheckpointError(
            f"{config.path} has num_attention_heads = {heads} and num_key_value_heads = {kv_heads}; the first "
            "must be a multiple of the second. Mend the file."
        )
    factor = config.rope("partial_rotary_factor")
    rotary = int(head_dim * (0.25 if factor is None else factor))
    if rotary < 2 or rotary % 2 or rotary > head_dim:
        raise CheckpointError(
            f"{config.path} makes {rotary} of {head_dim} head dimensions rotary, expected an even number of them. "
            "Mend partial_rotary_factor or head_dim."
        )
    theta = config.rope("rope_theta") or _ROPE_THETA
    return AttentionSpec(heads, kv_heads, head_dim, rotary, theta, output_gate=True, qk_norm=True, bias=False)


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


def _prefix(checkpoint: Checkpoint) -> str:
    names = [*checkpoint.tensors, *(name for shard in checkpoint.missing for name in shard.tensors)]
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in names:
            return prefix
    for prefix in _PREFIXES:
        if any(name.startswith(f"{prefix}layers.") for name in names):
            return prefix
    raise CheckpointError(
        f"{checkpoint.directory} holds no {_PREFIXES[0]}embed_tokens.weight and no {_PREFIXES[1]}embed_tokens.weight "
        f"among its {len(checkpoint.tensors)} tensors. Use a checkpoint with one of these layouts."
    )


def _norm(role: str, key: str, width: int) -> Need:
    return Need(role, key, (width,), "one_plus")


def _layer_needs(role: str, key: str, layer: LayerSpec, hidden: int) -> list[Need]:
    size = layer.intermediate_size
    shared = [
        _norm(f"{role}input_norm", f"{key}input_layernorm.weight", hidden),
        _norm(f"{role}post_norm", f"{key}post_attention_layernorm.weight", hidden),
        Need(f"{role}mlp.gate", f"{key}mlp.gate_proj.weight", (size, hidden)),
        Need(f"{role}mlp.up", f"{key}mlp.up_proj.weight", (size, hidden)),
        Need(f"{role}mlp.down", f"{key}mlp.down_proj.weight", (hidden, size)),
    ]
    if isinstance(layer.mixer, AttentionSpec):
        return shared + _attention_needs(f"{role}mixer.", f"{key}self_attn.", layer.mixer, hidden)
    return shared + _delta_needs(f"{role}mixer.", f"{key}linear_attn.", layer.mixer, hidden)


def _attention_needs(role: str, key: str, mixer: AttentionSpec, hidden: int) -> list[Need]:
    return [
        Need(f"{role}query_gate", f"{key}q_proj.weight", (2 * mixer.query_width, hidden)),
        Need(f"{role}key", f"{key}k_proj.weight", (mixer.kv_width, hidden)),
        Need(f"{role}value", f"{key}v_proj.weight", (mixer.kv_width, hidden)),
        Need(f"{role}output", f"{key}o_proj.weight", (hidden, mixer.query_width)),
        _norm(f"{role}query_norm", f"{key}q_norm.weight", mixer.head_dim),
        _norm(f"{role}key_norm", f"{key}k_norm.weight", mixer.head_dim),
    ]


def _delta_needs(role: str, key: str, mixer: GatedDeltaSpec, hidden: int) -> list[Need]:
    return [
        Need(f"{role}query_key_value", f"{key}in_proj_qkv.weight", (mixer.conv_width, hidden)),
        Need(f"{role}gate", f"{key}in_proj_z.weight", (mixer.value_width, hidden)),
        Need(f"{role}b", f"{key}in_proj_b.weight", (mixer.value_heads, hidden)),
        Need(f"{role}a", f"{key}in_proj_a.weight", (mixer.value_heads, hidden)),
        Need(f"{role}conv", f"{key}conv1d.weight", (mixer.conv_width, 1, mixer.conv_kernel)),
        Need(f"{role}a_log", f"{key}A_log", (mixer.value_heads,)),
        Need(f"{role}dt_bias", f"{key}dt_bias", (mixer.value_heads,)),
        # Plain gain: the one norm of this family that is not zero-centred.
        Need(f"{role}norm", f"{key}norm.weight", (mixer.value_head_dim,)),
        Need(f"{role}output", f"{key}out_proj.weight", (hidden, mixer.value_width)),
    ]


def _backbone_needs(spec: ModelSpec, prefix: str) -> list[Need]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    head_key = f"{prefix}embed_tokens.weight" if spec.tied_head else "lm_head.weight"
    needs = [
        Need("embedding", f"{prefix}embed_tokens.weight", (vocab, hidden)),
        _norm("final_norm", f"{prefix}norm.weight", hidden),
        Need("head", head_key, (vocab, hidden)),
    ]
    for index, layer in enumerate(spec.layers):
        needs += _layer_needs(f"layers.{index}.", f"{prefix}layers.{index}.", layer, hidden)
    return needs


def _head_needs(hidden: int, layer: LayerSpec) -> list[Need]:
    return [
        Need("mtp.projection", "mtp.fc.weight", (hidden, 2 * hidden)),
        _norm("mtp.embedding_norm", "mtp.pre_fc_norm_embedding.weight", hidden),
        _norm("mtp.hidden_norm", "mtp.pre_fc_norm_hidden.weight", hidden),
        _norm("mtp.output_norm", "mtp.norm.weight", hidden),
        *_layer_needs("mtp.layer.", "mtp.layers.0.", layer, hidden),
    ]


def _ignored(checkpoint: Checkpoint, needs: list[Need], with_mtp: bool, tied: bool) -> dict[str, tuple[str, ...]]:
    used = {need.key for need in needs}
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
