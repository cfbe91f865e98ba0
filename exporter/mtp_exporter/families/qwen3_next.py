"""Qwen3-Next: two packed projections in front of a delta layer, grouped by key head; a mixture of experts."""

from __future__ import annotations

from mtp_engines.contracts.model import DenseMlpSpec, GatedDeltaSpec, Mlp
from mtp_exporter.families.common import belongs
from mtp_exporter.families.description import Description, Need, Part, Wanted
from mtp_exporter.families.hybrid import Layout, describe_hybrid, layer_moe
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.config import Config

MODEL_TYPES = ("qwen3_next",)
ARCHITECTURES = ("Qwen3NextForCausalLM",)


def recognises(checkpoint: Checkpoint) -> bool:
    """By model_type and architectures."""
    return belongs(checkpoint, MODEL_TYPES, ARCHITECTURES)


def describe(checkpoint: Checkpoint, wanted: Wanted) -> Description:
    """Describe a Qwen3-Next checkpoint."""
    return describe_hybrid(checkpoint, wanted, _LAYOUT)


def _mlps(config: Config, layers: int) -> list[Mlp]:
    """Layer i has experts unless it is listed as dense or left out by the step; the head always has them."""
    dense = config.text.get("mlp_only_layers") or []
    step = config.positive("decoder_sparse_step", 1)
    moe = layer_moe(config)
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(layers)]
    plain = None if all(sparse) else DenseMlpSpec(config.positive("intermediate_size"))
    return [*(moe if has or plain is None else plain for has in sparse), moe]


def _delta_inputs(role: str, key: str, mixer: GatedDeltaSpec, hidden: int) -> list[Need]:
    """Rows of in_proj_qkvz come a key head at a time, [q | k | v | z], those of in_proj_ba [b | a].

    A key head serves value_heads / key_heads value heads, which lie side by side.
    """
    share = mixer.value_heads // mixer.key_heads
    dk, dv = mixer.key_head_dim, share * mixer.value_head_dim
    wide = _Grouped(f"{key}in_proj_qkvz.weight", mixer.key_heads, 2 * dk + 2 * dv, hidden)
    narrow = _Grouped(f"{key}in_proj_ba.weight", mixer.key_heads, 2 * share, hidden)
    query_key_value = (*wide.rows(0, dk), *wide.rows(dk, 2 * dk), *wide.rows(2 * dk, 2 * dk + dv))
    return [
        Need(f"{role}query_key_value", query_key_value, (mixer.conv_width, hidden)),
        Need(f"{role}gate", wide.rows(2 * dk + dv, 2 * dk + 2 * dv), (mixer.value_width, hidden)),
        Need(f"{role}b", narrow.rows(0, share), (mixer.value_heads, hidden)),
        Need(f"{role}a", narrow.rows(share, 2 * share), (mixer.value_heads, hidden)),
    ]


class _Grouped:
    """A matrix whose rows come in equal groups, one for each key head."""

    def __init__(self, key: str, groups: int, size: int, width: int) -> None:
        self._key, self._groups, self._size, self._width = key, groups, size, width

    def rows(self, start: int, stop: int) -> tuple[Part, ...]:
        """Rows start .. stop - 1 of every group."""
        shape = (self._groups * self._size, self._width)
        firsts = range(0, self._groups * self._size, self._size)
        return tuple(Part(self._key, shape, first + start, first + stop) for first in firsts)


_LAYOUT = Layout(
    family="qwen3_next",
    prefixes=("model.",),
    depth_field="num_nextn_predict_layers",
    rope_theta=10_000.0,
    delta_inputs=_delta_inputs,
    mlps=_mlps,
)
