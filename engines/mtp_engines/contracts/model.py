"""What a model is made of: enough to build its graphs, to run NumPy over it and to size its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FLOAT_BYTES = 4


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained on.

    `linear` divides every frequency by `factor`. `llama3` leaves short wavelengths alone, divides long ones
    and blends between (`low_factor`, `high_factor`: original length over wavelength). `yarn` blends by the
    number of rotations over the original length (`low_factor` is its beta_slow, `high_factor` its
    beta_fast); `magnitude` multiplies its cosines and sines.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_positions: int = 0
    low_factor: float = 1.0
    high_factor: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True
    """yarn: whether the borders of the blend are rounded to whole dimensions."""


@dataclass(frozen=True)
class RotarySpec:
    """Rotary positions on the first `dim` dimensions of each head.

    `interleaved` pairs neighbours (2i, 2i + 1); otherwise dimension i is paired with i + dim / 2.
    """

    dim: int
    theta: float
    interleaved: bool = False
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions.

    `output_gate`: a sigmoid gate on the output, interleaved per head with the query; `qk_norm`: an RMS norm
    of each query and key head before the rotation; `bias`: query, key and value projections have one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotarySpec
    output_gate: bool
    qk_norm: bool
    bias: bool
    kind: Literal["attention"] = "attention"

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention over one compressed row a token: [normed latent | rotated key].

    Keys and values of every head are linear maps of the latent; the maps are applied to query and output
    instead, so that the cache holds `latent_dim + rotary.dim` values a token whatever the number of heads.
    `query_rank` is None where the query is projected in one step.
    """

    num_heads: int
    query_rank: int | None
    latent_dim: int
    key_dim: int
    """Dimensions of a query and key head without position."""
    value_dim: int
    rotary: RotarySpec
    scale: float
    """Factor of the scores."""
    norm_epsilon: float
    """Of the norms of the compressed rows."""
    bias: bool = False
    """The two compressing projections and the output projection have one."""
    kind: Literal["latent_attention"] = "latent_attention"

    @property
    def row_width(self) -> int:
        """Width of the cache."""
        return self.latent_dim + self.rotary.dim

    @property
    def query_width(self) -> int:
        """Width of all query heads, with and without position."""
        return self.num_heads * (self.key_dim + self.rotary.dim)


@dataclass(frozen=True)
class GatedDeltaSpec:
    """A gated delta layer with a short causal convolution in front of the recurrence."""

    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    kind: Literal["gated_delta"] = "gated_delta"

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: query, key and value side by side."""
        return 2 * self.key_width + self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent and convolution state of one sequence (float32)."""
        recurrent = self.value_heads * self.key_head_dim * self.value_head_dim
        return FLOAT_BYTES * (recurrent + (self.conv_kernel - 1) * self.conv_width)

    @property
    def factor_widths(self) -> dict[str, int]:
        """Width of each replay factor of one row; `conv` is the raw row of the convolution, the key has length 1."""
        names = ("conv", "key", "value", "decay", "beta")
        widths = (self.conv_width, self.key_width, self.value_width, self.value_heads, self.value_heads)
        return dict(zip(names, widths, strict=True))

    @property
    def factor_bytes(self) -> int:
        """Bytes of the replay factors of one row."""
        return FLOAT_BYTES * sum(self.factor_widths.values())


CachedMixer = AttentionSpec | LatentAttentionSpec
"""Mixers whose state is a cache with one row a token, cut back by its length."""
Mixer = AttentionSpec | LatentAttentionSpec | GatedDeltaSpec


@dataclass(frozen=True)
class DenseMlpSpec:
    """down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    kind: Literal["dense"] = "dense"


@dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts: each row goes to `top_k` of `experts` gated MLPs, and to a shared one if there is one.

    Routing: scores = softmax or sigmoid of the router's logits. Choices are made by score plus
    `correction_bias`, if there is one, among the `top_groups` groups of experts whose two best choices sum
    highest; weights are the scores themselves, divided by their sum if `normalise`, times `scale`.
    `shared_gate`: the shared expert's output is multiplied by a sigmoid of its own.
    """

    experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"]
    normalise: bool
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    kind: Literal["moe"] = "moe"


Mlp = DenseMlpSpec | MoeSpec


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: a mixer and an MLP, each behind a norm and a residual.

    `input_norm` False: the mixer takes the residual stream as it is.
    """

    mixer: Mixer
    mlp: Mlp
    input_norm: bool = True


@dataclass(frozen=True)
class MtpSpec:
    """A draft head: embedded in the checkpoint (`mtp`) or trained beside it (`eagle`, `eagle3`).

    `layers` has one layer for each trained depth. With `join` = `projection`, embedding and hidden state are
    normed (`input_norms`), laid side by side in the order `concat` and projected to the width of the layer;
    with `attention` they are normed and go side by side into query, key and value, while the hidden state
    (after its norm if `residual_normed`) is the residual stream.
    """

    layers: tuple[LayerSpec, ...]
    hidden_size: int
    kind: Literal["mtp", "eagle", "eagle3"] = "mtp"
    join: Literal["projection", "attention"] = "projection"
    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"
    input_norms: bool = True
    join_bias: bool = False
    residual_normed: bool = False
    taps: tuple[int, ...] = ()
    """What the head was trained on: the residual streams that enter these layers of the target, side by side
    (the number of layers means the last one, before the final norm). Empty: the target's hidden state after
    its final norm, the very tensor that its vocabulary head consumes."""
    tap_projection: bool = False
    """The taps go through a matrix of the head; its own chained states do not."""
    output_norm: bool = True
    chain: Literal["output", "residual"] = "output"
    """What a chained step feeds back: the head's output after its last norm, or before it."""
    norm_epsilon: float | None = None
    """None: the target's."""
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None
    """Rows of an own vocabulary head that covers a part of the vocabulary."""
    draft_ids: Literal["table", "first"] = "table"
    """What these rows are: a table of the draft's gives their ids, or they are the first ids of the vocabulary."""

    @property
    def has_table(self) -> bool:
        """Whether ids of the draft have to be looked up."""
        return self.draft_vocab_size is not None and self.draft_ids == "table"

    @property
    def depth(self) -> int:
        """Trained depths."""
        return len(self.layers)

    @property
    def tap(self) -> str:
        """Name of the hidden state that the head was trained on."""
        return "final_norm" if not self.taps else "residual " + ", ".join(map(str, self.taps))

    def tap_width(self, target_hidden_size: int) -> int:
        """Width of one row of the tap."""
        return max(len(self.taps), 1) * target_hidden_size


@dataclass(frozen=True)
class ModelSpec:
    """A target model and, if it has one, its draft head."""

    family: str
    hidden_size: int
    vocab_size: int
    norm_epsilon: float
    max_position: int
    tied_head: bool
    layers: tuple[LayerSpec, ...]
    mtp: MtpSpec | None

    @property
    def tap_width(self) -> int:
        """Width of one row of the hidden state that a verify hands to the head."""
        return self.mtp.tap_width(self.hidden_size) if self.mtp else self.hidden_size

    def cached_layers(self) -> Iterator[tuple[int, CachedMixer]]:
        """Index and mixer of every layer of the target that keeps a cache."""
        for index, layer in enumerate(self.layers):
            if not isinstance(layer.mixer, GatedDeltaSpec):
                yield index, layer.mixer

    def delta_layers(self) -> Iterator[tuple[int, GatedDeltaSpec]]:
        """Index and mixer of every gated delta layer of the target."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mixer, GatedDeltaSpec):
                yield index, layer.mixer

    def head_mixers(self) -> tuple[CachedMixer, ...]:
        """The mixer of every depth of the head."""
        mixers = [layer.mixer for layer in self.mtp.layers] if self.mtp else []
        return tuple(mixer for mixer in mixers if not isinstance(mixer, GatedDeltaSpec))

    @property
    def state_bytes_per_sequence(self) -> int:
        """Recurrent and convolution state of one sequence (float32), committed copy only."""
        return sum(mixer.state_bytes for _, mixer in self.delta_layers())

    @property
    def factor_bytes_per_row(self) -> int:
        """Replay factors that one verified row leaves for the commit (float32)."""
        return sum(mixer.factor_bytes for _, mixer in self.delta_layers())
