"""What a model is made of: enough to build its graphs, to run NumPy over it and to size its state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FLOAT_BYTES = 4


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention with rotary positions on the first `rotary_dim` dimensions of each head.

    `output_gate`: a sigmoid gate on the output, interleaved per head with the query; `qk_norm`: an RMS norm
    of each query and key head before the rotation; `bias`: query, key and value projections have one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
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

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token adds to the key and value caches of one layer (float32)."""
        return 2 * self.kv_width * FLOAT_BYTES


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
    def factor_bytes(self) -> int:
        """Bytes of the replay factors of one row: raw convolution row, unit key, value, decay, beta."""
        return FLOAT_BYTES * (self.conv_width + self.key_width + self.value_width + 2 * self.value_heads)


Mixer = AttentionSpec | GatedDeltaSpec


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: a mixer and a gated MLP, each behind a norm and a residual."""

    mixer: Mixer
    intermediate_size: int


@dataclass(frozen=True)
class MtpSpec:
    """The multi-token-prediction head: how it joins embedding and hidden state, and its one layer.

    `concat` is the order in the fusion projection; `hidden_tap` says which hidden state of the target
    the head was trained on; a chained step feeds the head's own output after its last norm.
    """

    layer: LayerSpec
    depth: int = 1
    concat: Literal["embedding_first", "hidden_first"] = "embedding_first"
    hidden_tap: Literal["final_norm"] = "final_norm"


@dataclass(frozen=True)
class ModelSpec:
    """A target model and, if it has one, its MTP head."""

    family: str
    hidden_size: int
    vocab_size: int
    norm_epsilon: float
    max_position: int
    tied_head: bool
    layers: tuple[LayerSpec, ...]
    mtp: MtpSpec | None

    def attention_layers(self) -> Iterator[tuple[int, AttentionSpec]]:
        """Index and mixer of every attention layer of the target."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mixer, AttentionSpec):
                yield index, layer.mixer

    def delta_layers(self) -> Iterator[tuple[int, GatedDeltaSpec]]:
        """Index and mixer of every gated delta layer of the target."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer.mixer, GatedDeltaSpec):
                yield index, layer.mixer

    @property
    def kv_bytes_per_token(self) -> int:
        """Cache bytes a token of one sequence, target and head together (float32)."""
        total = sum(mixer.bytes_per_token for _, mixer in self.attention_layers())
        if self.mtp and isinstance(self.mtp.layer.mixer, AttentionSpec):
            total += self.mtp.layer.mixer.bytes_per_token
        return total

    @property
    def state_bytes_per_sequence(self) -> int:
        """Recurrent and convolution state of one sequence (float32), committed copy only."""
        return sum(mixer.state_bytes for _, mixer in self.delta_layers())

    @property
    def factor_bytes_per_row(self) -> int:
        """Replay factors that one verified row leaves for the commit (float32)."""
        return sum(mixer.factor_bytes for _, mixer in self.delta_layers())
