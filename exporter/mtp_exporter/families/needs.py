"""The tensors of standard layers under the names that most checkpoints give them."""

from __future__ import annotations

from collections.abc import Callable

from mtp_engines.contracts.model import AttentionSpec, LatentAttentionSpec, MoeSpec
from mtp_exporter.families.description import Need, Part
from mtp_exporter.reading.checkpoint import Checkpoint

Norm = Callable[[str, str, int], Need]
"""Role, key, width -> need; families differ in whether a gain is w or 1 + w."""


def plain_norm(role: str, key: str, width: int) -> Need:
    """A norm whose weight is its gain."""
    return Need(role, key, (width,))


def zero_centred_norm(role: str, key: str, width: int) -> Need:
    """A norm whose gain is 1 + weight."""
    return Need(role, key, (width,), "one_plus")


def attention_needs(
    role: str, key: str, mixer: AttentionSpec, hidden: int, norm: Norm = plain_norm, input_width: int | None = None
) -> list[Need]:
    """Projections, biases and head norms; `input_width` where it is not the hidden size."""
    wide = hidden if input_width is None else input_width
    query = ("query_gate", 2 * mixer.query_width) if mixer.output_gate else ("query", mixer.query_width)
    widths = {"q": query, "k": ("key", mixer.kv_width), "v": ("value", mixer.kv_width)}
    needs = [
        Need(f"{role}{name}", f"{key}{short}_proj.weight", (width, wide)) for short, (name, width) in widths.items()
    ]
    if mixer.bias:
        needs += [Need(f"{role}{name}_bias", f"{key}{s}_proj.bias", (width,)) for s, (name, width) in widths.items()]
    needs.append(Need(f"{role}output", f"{key}o_proj.weight", (hidden, mixer.query_width)))
    if mixer.qk_norm:
        needs += [
            norm(f"{role}{name}_norm", f"{key}{name[0]}_norm.weight", mixer.head_dim) for name in ("query", "key")
        ]
    return needs


def latent_attention_needs(role: str, key: str, mixer: LatentAttentionSpec, hidden: int) -> list[Need]:
    """Compressing and expanding projections; the expansion of the latent is cut into its key and value maps."""
    heads, rank = mixer.num_heads, mixer.latent_dim
    pair = mixer.key_dim + mixer.value_dim
    whole = (heads * pair, rank)

    def slices(start: int, stop: int) -> tuple[Part, ...]:
        return tuple(Part(f"{key}kv_b_proj.weight", whole, h * pair + start, h * pair + stop) for h in range(heads))

    needs = [
        Need(f"{role}compress", f"{key}kv_a_proj_with_mqa.weight", (mixer.row_width, hidden)),
        Need(f"{role}latent_norm", f"{key}kv_a_layernorm.weight", (rank,)),
        Need(f"{role}key_map", slices(0, mixer.key_dim), (heads, mixer.key_dim, rank)),
        Need(f"{role}value_map", slices(mixer.key_dim, pair), (heads, mixer.value_dim, rank)),
        Need(f"{role}output", f"{key}o_proj.weight", (hidden, heads * mixer.value_dim)),
    ]
    if mixer.query_rank is None:
        needs.append(Need(f"{role}query", f"{key}q_proj.weight", (mixer.query_width, hidden)))
    else:
        needs += [
            Need(f"{role}query_compress", f"{key}q_a_proj.weight", (mixer.query_rank, hidden)),
            Need(f"{role}query_latent_norm", f"{key}q_a_layernorm.weight", (mixer.query_rank,)),
            Need(f"{role}query", f"{key}q_b_proj.weight", (mixer.query_width, mixer.query_rank)),
        ]
    if mixer.bias:
        needs += [
            Need(f"{role}compress_bias", f"{key}kv_a_proj_with_mqa.bias", (mixer.row_width,)),
            Need(f"{role}output_bias", f"{key}o_proj.bias", (hidden,)),
        ]
        if mixer.query_rank is not None:
            needs.append(Need(f"{role}query_compress_bias", f"{key}q_a_proj.bias", (mixer.query_rank,)))
    return needs


def dense_mlp_needs(role: str, key: str, size: int, hidden: int) -> list[Need]:
    """gate, up and down of a gated MLP."""
    return [
        Need(f"{role}gate", f"{key}gate_proj.weight", (size, hidden)),
        Need(f"{role}up", f"{key}up_proj.weight", (size, hidden)),
        Need(f"{role}down", f"{key}down_proj.weight", (hidden, size)),
    ]


def moe_needs(
    checkpoint: Checkpoint, role: str, key: str, moe: MoeSpec, hidden: int, shared: str = "shared_expert"
) -> list[Need]:
    """Router, experts (fused or one by one, as the checkpoint has them) and shared expert; `key` ends in `mlp.`."""
    needs = [
        Need(f"{role}router", f"{key}gate.weight", (moe.experts, hidden)),
        *_expert_needs(checkpoint, f"{role}experts.", f"{key}experts.", moe, hidden),
    ]
    if moe.correction_bias:
        needs.append(Need(f"{role}correction_bias", f"{key}gate.e_score_correction_bias", (moe.experts,)))
    if moe.shared_intermediate_size:
        needs += dense_mlp_needs(f"{role}shared.", f"{key}{shared}.", moe.shared_intermediate_size, hidden)
    if moe.shared_gate:
        needs.append(Need(f"{role}shared_gate", f"{key}{shared}_gate.weight", (1, hidden)))
    return needs


def _expert_needs(checkpoint: Checkpoint, role: str, key: str, moe: MoeSpec, hidden: int) -> list[Need]:
    count, size = moe.experts, moe.intermediate_size
    both, down = (count, 2 * size, hidden), (count, hidden, size)
    if any(checkpoint.names(f"{key}{name}") for name in ("gate_up_proj", "down_proj")):
        return [Need(f"{role}gate_up", f"{key}gate_up_proj", both), Need(f"{role}down", f"{key}down_proj", down)]
    pairs = tuple(Part(f"{key}{e}.{name}_proj.weight", (size, hidden)) for e in range(count) for name in ("gate", "up"))
    downs = tuple(Part(f"{key}{e}.down_proj.weight", (hidden, size)) for e in range(count))
    return [Need(f"{role}gate_up", pairs, both), Need(f"{role}down", downs, down)]
