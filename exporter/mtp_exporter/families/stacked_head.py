"""Heads stored as decoder layers behind the last one, model.layers.{num_hidden_layers + depth}."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtp_engines.contracts.model import DenseMlpSpec, LayerSpec, Mixer, ModelSpec, MoeSpec, MtpSpec
from mtp_engines.errors import CheckpointError
from mtp_exporter.families.common import is_tied
from mtp_exporter.families.description import Description, Duplicate, Need, Wanted, require_head
from mtp_exporter.families.needs import dense_mlp_needs, moe_needs
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

MixerNeeds = Callable[[str, str], list[Need]]
"""Role, key -> the tensors of the mixer."""
MOST_DEPTHS = 8
_FIELD = "num_nextn_predict_layers"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Layout:
    """What one family of this kind has of its own."""

    family: str
    mixer: Mixer
    mixer_needs: MixerNeeds
    norm_epsilon: float
    max_position: int
    notes: tuple[str, ...]


def describe_stacked(checkpoint: Checkpoint, config: Config, wanted: Wanted, layout: Layout) -> Description:
    """Describe a checkpoint whose head is stored as layers; the head always has experts."""
    hidden, count = config.positive("hidden_size"), config.positive("num_hidden_layers")
    moe, dense = routed_moe(config), DenseMlpSpec(config.positive("intermediate_size"))
    dense_layers = config.text.get("first_k_dense_replace") or 0
    layers = tuple(LayerSpec(layout.mixer, dense if i < dense_layers else moe) for i in range(count))
    head_layer = LayerSpec(layout.mixer, moe)

    def head_needs(depth: int) -> list[Need]:
        key = f"model.layers.{count + depth}."
        return _head_needs(checkpoint, _role(depth), key, head_layer, layout, hidden)

    declared = config.text.get(_FIELD)
    keys = [_keys(head_needs(depth)) for depth in range(MOST_DEPTHS + 1)]
    promised = declared if isinstance(declared, int) else 0

    def expected(depth: int) -> tuple[str, ...]:
        return keys[depth] if depth < promised or _is_head(checkpoint, count + depth) else ()

    depths = require_head(checkpoint, declared, expected, _FIELD, MOST_DEPTHS) if wanted.mtp else 0
    tied, vocab = is_tied(checkpoint, config), config.positive("vocab_size")
    copies = [copy for depth in range(depths) for copy in _copies(checkpoint, count + depth, tied)]
    own = {copy.left_out for copy in copies} & wanted.own_copies
    _refuse_mixed_owners(own, depths)
    head_of_own, embedding_of_own = (_ending(own, end) for end in ("shared_head.head.weight", "embed_tokens.weight"))
    mtp = MtpSpec((head_layer,) * depths, hidden, own_head=bool(head_of_own), own_embedding=bool(embedding_of_own))
    spec = ModelSpec(
        family=layout.family,
        hidden_size=hidden,
        vocab_size=vocab,
        norm_epsilon=layout.norm_epsilon,
        max_position=layout.max_position,
        tied_head=tied,
        layers=layers,
        mtp=mtp if depths else None,
    )
    needs = [need for depth in range(depths) for need in head_needs(depth)]
    needs += [Need("mtp.head", key, (vocab, hidden)) for key in head_of_own]
    needs += [Need("mtp.embedding", key, (vocab, hidden)) for key in embedding_of_own]
    needs += _trunk_needs(checkpoint, spec, layout)
    duplicates = tuple(copy for copy in copies if copy.left_out not in own)
    if tied and _HEAD in checkpoint.tensors:
        duplicates += (Duplicate(_HEAD, _EMBEDDING),)
    ignored = _ignored(checkpoint, duplicates, count, wanted)
    return Description(spec, tuple(needs), ignored, declared, _flat(keys[: max(depths, 1)]), duplicates, layout.notes)


def routed_moe(config: Config) -> MoeSpec:
    """Sigmoid routing by groups with a correction bias, and shared experts without a gate.

    Raises:
        CheckpointError: experts and groups do not fit together.
    """
    experts, groups = config.positive("n_routed_experts"), config.positive("n_group", 1)
    top_k, top_groups = config.positive("num_experts_per_tok"), config.positive("topk_group", 1)
    config.fixed("scoring_func", "sigmoid")
    config.fixed("topk_method", "noaux_tc")
    if experts % groups or top_groups > groups or top_k > experts // groups * top_groups:
        raise CheckpointError(
            f"{config.path} has n_routed_experts = {experts}, n_group = {groups}, topk_group = {top_groups} and "
            f"num_experts_per_tok = {top_k}, which do not fit together. Mend the file."
        )
    size = config.positive("moe_intermediate_size")
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        intermediate_size=size,
        scoring="sigmoid",
        normalise=bool(config.text.get("norm_topk_prob", True)),
        shared_intermediate_size=size * int(config.text.get("n_shared_experts") or 0),
        correction_bias=True,
        groups=groups,
        top_groups=top_groups,
        scale=config.number("routed_scaling_factor", 1.0),
    )


def _role(depth: int) -> str:
    return f"mtp.{depth}." if depth else "mtp."


def _flat(keys: list[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(key for of_depth in keys for key in of_depth)


def _keys(needs: list[Need]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.key for need in needs for part in need.parts))


def _layer_needs(
    checkpoint: Checkpoint, role: str, key: str, layer: LayerSpec, layout: Layout, hidden: int
) -> list[Need]:
    needs = [
        Need(f"{role}input_norm", f"{key}input_layernorm.weight", (hidden,)),
        Need(f"{role}post_norm", f"{key}post_attention_layernorm.weight", (hidden,)),
        *layout.mixer_needs(f"{role}mixer.", f"{key}self_attn."),
    ]
    if isinstance(layer.mlp, DenseMlpSpec):
        return needs + dense_mlp_needs(f"{role}mlp.", f"{key}mlp.", layer.mlp.intermediate_size, hidden)
    return needs + moe_needs(checkpoint, f"{role}mlp.", f"{key}mlp.", layer.mlp, hidden, "shared_experts")


def _head_needs(
    checkpoint: Checkpoint, role: str, key: str, layer: LayerSpec, layout: Layout, hidden: int
) -> list[Need]:
    return [
        Need(f"{role}embedding_norm", f"{key}enorm.weight", (hidden,)),
        Need(f"{role}hidden_norm", f"{key}hnorm.weight", (hidden,)),
        Need(f"{role}projection", f"{key}eh_proj.weight", (hidden, 2 * hidden)),
        Need(f"{role}output_norm", f"{key}shared_head.norm.weight", (hidden,)),
        *_layer_needs(checkpoint, f"{role}layer.", key, layer, layout, hidden),
    ]


def _trunk_needs(checkpoint: Checkpoint, spec: ModelSpec, layout: Layout) -> list[Need]:
    hidden, vocab = spec.hidden_size, spec.vocab_size
    needs = [
        Need("embedding", _EMBEDDING, (vocab, hidden)),
        Need("final_norm", "model.norm.weight", (hidden,)),
        Need("head", _EMBEDDING if spec.tied_head else _HEAD, (vocab, hidden)),
    ]
    for index, layer in enumerate(spec.layers):
        needs += _layer_needs(checkpoint, f"layers.{index}.", f"model.layers.{index}.", layer, layout, hidden)
    return needs


def _copies(checkpoint: Checkpoint, layer: int, tied: bool) -> list[Duplicate]:
    """The embedding and vocabulary head that a stored layer repeats."""
    pairs = {"embed_tokens.weight": _EMBEDDING, "shared_head.head.weight": _EMBEDDING if tied else _HEAD}
    places = {f"model.layers.{layer}.{name}": kept for name, kept in pairs.items()}
    return [Duplicate(name, kept, own=True) for name, kept in places.items() if checkpoint.names(name)]


def _is_head(checkpoint: Checkpoint, layer: int) -> bool:
    """Whether a layer behind the last one is a head, and not a layer of the trunk that the configuration leaves out."""
    marks = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens")
    return any(checkpoint.names(f"model.layers.{layer}.{mark}.weight") for mark in marks)


def _refuse_mixed_owners(own: set[str], depths: int) -> None:
    """Refuse a head of several depths that does not share the target's embedding and vocabulary head.

    Raises:
        CheckpointError: names the first tensor that differs.
    """
    if own and depths > 1:
        named = " and ".join(map(repr, sorted(own)))
        raise CheckpointError(
            f"{named} differ from the target's, and the head has {depths} trained depths, which share the target's "
            "embedding and vocabulary head here. Use a checkpoint whose copies are equal."
        )


def _ending(names: set[str], ending: str) -> list[str]:
    return sorted(name for name in names if name.endswith(ending))


def _ignored(
    checkpoint: Checkpoint, duplicates: tuple[Duplicate, ...], layers: int, wanted: Wanted
) -> dict[str, tuple[str, ...]]:
    ignored: dict[str, tuple[str, ...]] = {}
    if duplicates:
        ignored["tensors equal to the target's embedding or head"] = tuple(pair.left_out for pair in duplicates)
    if stored := tuple(name for name in checkpoint.tensors if name.endswith(".rotary_emb.inv_freq")):
        ignored["stored rotary frequencies, which follow from rope_theta"] = stored
    if not wanted.mtp:
        behind = range(layers, layers + MOST_DEPTHS)
        heads = tuple(f"model.layers.{layer}." for layer in behind if _is_head(checkpoint, layer))
        if left_out := tuple(name for name in checkpoint.tensors if name.startswith(heads)):
            ignored["tensors of the MTP head (--no-mtp)"] = left_out
    return ignored
