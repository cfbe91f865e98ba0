"""One decoder layer: mixer and MLP, whose caches and states become inputs and outputs of the graph."""

from __future__ import annotations

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import (
    AttentionSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mixer,
    Mlp,
)
from mtp_exporter.layers.attention import Positions, attention, rotary_constants
from mtp_exporter.layers.basic import gated_mlp, rms_norm
from mtp_exporter.layers.gated_delta import gated_delta
from mtp_exporter.layers.latent_attention import latent_attention
from mtp_exporter.layers.moe import mixture_of_experts
from mtp_exporter.layers.weights import Weights
from mtp_plugins.graph import Axis, GraphBuilder

ROWS = ("batch", "rows")


class Decoder:
    """Adds decoder layers to one graph, which share positions and rotary tables."""

    def __init__(self, g: GraphBuilder, layers: tuple[LayerSpec, ...], limits: Limits, epsilon: float) -> None:
        self._g, self._epsilon = g, epsilon
        rotary = next((layer.mixer.rotary for layer in layers if not isinstance(layer.mixer, GatedDeltaSpec)), None)
        self._positions: Positions | None = None
        if rotary is not None:
            position_ids = g.input(names.POSITION_IDS, "int64", ROWS)
            past_length = g.input(names.PAST_LENGTH, "int64", ["batch"])
            self._positions = Positions(position_ids, past_length, *rotary_constants(g, rotary, limits.capacity))

    def layer(self, x: ir.Value, w: Weights, layer: LayerSpec, index: int) -> ir.Value:
        """x + mixer(norm(x)), then x + mlp(norm(x)); x is float32[batch, rows, hidden_size]."""
        normed = self.norm(x, w["input_norm"]) if layer.input_norm else x
        x = self._g.op("Add", x, self.mixer(normed, w.below("mixer."), layer.mixer, index))
        return self._g.op("Add", x, self.mlp(self.norm(x, w["post_norm"]), w.below("mlp."), layer.mlp, index))

    def norm(self, x: ir.Value, gain: ir.Value) -> ir.Value:
        """RMS norm with the model's epsilon."""
        return rms_norm(self._g, x, gain, self._epsilon)

    def mlp(self, x: ir.Value, w: Weights, mlp: Mlp, index: int | str) -> ir.Value:
        """Gated MLP or mixture of experts over normed rows of layer `index`."""
        if isinstance(mlp, DenseMlpSpec):
            return gated_mlp(self._g, x, w)
        return mixture_of_experts(self._g, x, w, mlp, names.routing(index))

    def mixer(self, x: ir.Value, w: Weights, mixer: Mixer, index: int) -> ir.Value:
        """Attention or recurrence over normed rows; the state of layer `index` enters and leaves the graph."""
        if isinstance(mixer, AttentionSpec):
            return self._attention(x, w, mixer, index)
        if isinstance(mixer, LatentAttentionSpec):
            return self._latent_attention(x, w, mixer, index)
        return self._gated_delta(x, w, mixer, index)

    def _attention(self, x: ir.Value, w: Weights, mixer: AttentionSpec, index: int) -> ir.Value:
        g, positions = self._g, self._positions
        assert positions is not None
        shape: list[Axis] = ["batch", mixer.num_kv_heads, "capacity", mixer.head_dim]
        cache = (
            g.input(names.past_key(index), "float32", shape),
            g.input(names.past_value(index), "float32", shape),
        )
        output, key, value = attention(g, x, w, mixer, self._epsilon, positions, cache)
        g.output(names.present_key(index), key, "float32", shape)
        g.output(names.present_value(index), value, "float32", shape)
        return output

    def _latent_attention(self, x: ir.Value, w: Weights, mixer: LatentAttentionSpec, index: int) -> ir.Value:
        g, positions = self._g, self._positions
        assert positions is not None
        shape: list[Axis] = ["batch", 1, "capacity", mixer.row_width]
        past = g.input(names.past_latent(index), "float32", shape)
        output, present = latent_attention(g, x, w, mixer, positions, past)
        g.output(names.present_latent(index), present, "float32", shape)
        return output

    def _gated_delta(self, x: ir.Value, w: Weights, mixer: GatedDeltaSpec, index: int) -> ir.Value:
        g = self._g
        conv_shape: list[Axis] = ["batch", mixer.conv_kernel - 1, mixer.conv_width]
        state_shape: list[Axis] = ["batch", mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim]
        state = (
            g.input(names.past_conv(index), "float32", conv_shape),
            g.input(names.past_recurrent(index), "float32", state_shape),
        )
        output, (conv, recurrent), factors = gated_delta(g, x, w, mixer, self._epsilon, state)
        g.output(names.present_conv(index), conv, "float32", conv_shape)
        g.output(names.present_recurrent(index), recurrent, "float32", state_shape)
        for name, width in mixer.factor_widths.items():
            g.output(names.factor(index, name), factors[name], "float32", [*ROWS, width])
        return output
