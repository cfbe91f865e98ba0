"""The two canonical graphs of a model: backbone and MTP head."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, GatedDeltaSpec, LayerSpec, ModelSpec
from mtp_engines.lowering.commit import factor_shapes
from mtp_exporter.layers.attention import Positions, attention, rotary_tables
from mtp_exporter.layers.basic import gated_mlp, linear, rms_norm
from mtp_exporter.layers.gated_delta import gated_delta
from mtp_exporter.layers.weights import Weights
from mtp_plugins.graph import DOMAIN, Axis, GraphBuilder
from mtp_plugins.registry import OPERATORS

Tensors = Mapping[str, ir.ExternalTensor]
_ROWS = ("batch", "rows")


def backbone_graph(spec: ModelSpec, limits: Limits, tensors: Tensors) -> ir.Model:
    """input_ids -> logits of the last rows, hidden states of all rows, caches, states, replay factors."""
    g = GraphBuilder("backbone")
    w = Weights(g, tensors)
    input_ids = g.input(names.INPUT_IDS, "int64", _ROWS)
    positions = _positions(g, spec.layers, limits)
    logit_rows = g.input(names.LOGIT_ROWS, "int64", [1])
    x = g.op("Gather", w["embedding"], input_ids, axis=0)
    for index, layer in enumerate(spec.layers):
        g.label(names.residual(index), x, "float32", [*_ROWS, spec.hidden_size])
        with g.scope(f"layers.{index}"):
            x = _layer(g, x, w.below(f"layers.{index}."), spec, layer, index, positions)
    g.label(names.residual(len(spec.layers)), x, "float32", [*_ROWS, spec.hidden_size])
    hidden = rms_norm(g, x, w["final_norm"], spec.norm_epsilon)
    _outputs(g, spec, hidden, names.HIDDEN, w["head"], logit_rows)
    return _model(g)


def mtp_graph(spec: ModelSpec, limits: Limits, tensors: Tensors) -> ir.Model:
    """input_ids and hidden_states -> logits of the last rows, the head's own hidden states, its cache.

    Row p takes the token after position p and the target's hidden state of position p, or the head's
    own output in a chained step.
    """
    assert spec.mtp is not None
    g = GraphBuilder("mtp")
    w = Weights(g, tensors)
    input_ids = g.input(names.INPUT_IDS, "int64", _ROWS)
    hidden_in = g.input(names.HIDDEN, "float32", [*_ROWS, spec.hidden_size])
    positions = _positions(g, (spec.mtp.layer,), limits)
    logit_rows = g.input(names.LOGIT_ROWS, "int64", [1])
    embedding = rms_norm(
        g, g.op("Gather", w["embedding"], input_ids, axis=0), w["mtp.embedding_norm"], spec.norm_epsilon
    )
    hidden = rms_norm(g, hidden_in, w["mtp.hidden_norm"], spec.norm_epsilon)
    # The order the projection was trained on; swapped, it still runs and drafts noise.
    parts = (embedding, hidden) if spec.mtp.concat == "embedding_first" else (hidden, embedding)
    x = linear(g, g.op("Concat", *parts, axis=-1), w["mtp.projection"])
    with g.scope("layer"):
        x = _layer(g, x, w.below("mtp.layer."), spec, spec.mtp.layer, 0, positions)
    out = rms_norm(g, x, w["mtp.output_norm"], spec.norm_epsilon)
    _outputs(g, spec, out, names.HIDDEN_OUT, w["head"], logit_rows)
    return _model(g)


def _positions(g: GraphBuilder, layers: tuple[LayerSpec, ...], limits: Limits) -> Positions | None:
    mixer = next((layer.mixer for layer in layers if isinstance(layer.mixer, AttentionSpec)), None)
    if mixer is None:
        return None
    position_ids = g.input(names.POSITION_IDS, "int64", _ROWS)
    past_length = g.input(names.PAST_LENGTH, "int64", ["batch"])
    return Positions(position_ids, past_length, *rotary_tables(g, mixer, limits.capacity))


def _layer(
    g: GraphBuilder,
    x: ir.Value,
    w: Weights,
    spec: ModelSpec,
    layer: LayerSpec,
    index: int,
    positions: Positions | None,
) -> ir.Value:
    """x + mixer(norm(x)), then x + mlp(norm(x)); caches and states become inputs and outputs of the graph."""
    normed = rms_norm(g, x, w["input_norm"], spec.norm_epsilon)
    if isinstance(layer.mixer, AttentionSpec):
        assert positions is not None
        mixed = _attention(g, normed, w.below("mixer."), layer.mixer, spec, index, positions)
    else:
        mixed = _gated_delta(g, normed, w.below("mixer."), layer.mixer, spec, index)
    x = g.op("Add", x, mixed)
    return g.op("Add", x, gated_mlp(g, rms_norm(g, x, w["post_norm"], spec.norm_epsilon), w.below("mlp.")))


def _attention(
    g: GraphBuilder,
    x: ir.Value,
    w: Weights,
    mixer: AttentionSpec,
    spec: ModelSpec,
    index: int,
    positions: Positions,
) -> ir.Value:
    shape: list[Axis] = ["batch", mixer.num_kv_heads, "capacity", mixer.head_dim]
    cache = (
        g.input(names.past_key(index), "float32", shape),
        g.input(names.past_value(index), "float32", shape),
    )
    output, key, value = attention(g, x, w, mixer, spec.norm_epsilon, positions, cache)
    g.output(names.present_key(index), key, "float32", shape)
    g.output(names.present_value(index), value, "float32", shape)
    return output


def _gated_delta(
    g: GraphBuilder, x: ir.Value, w: Weights, mixer: GatedDeltaSpec, spec: ModelSpec, index: int
) -> ir.Value:
    conv_shape: list[Axis] = ["batch", mixer.conv_kernel - 1, mixer.conv_width]
    state_shape: list[Axis] = ["batch", mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim]
    state = (
        g.input(names.past_conv(index), "float32", conv_shape),
        g.input(names.past_recurrent(index), "float32", state_shape),
    )
    output, (conv, recurrent), factors = gated_delta(g, x, w, mixer, spec.norm_epsilon, state)
    g.output(names.present_conv(index), conv, "float32", conv_shape)
    g.output(names.present_recurrent(index), recurrent, "float32", state_shape)
    for name, shape in factor_shapes(mixer).items():
        g.output(names.factor(index, name), factors[name], "float32", [*_ROWS, *shape])
    return output


def _outputs(
    g: GraphBuilder, spec: ModelSpec, hidden: ir.Value, name: str, head: ir.Value, logit_rows: ir.Value
) -> None:
    end = g.constant([9223372036854775807])
    start = g.op("Sub", g.op("Shape", hidden, start=1, end=2), logit_rows)
    last = g.op("Slice", hidden, start, end, g.constant([1]))
    g.output(name, hidden, "float32", [*_ROWS, spec.hidden_size])
    g.output(names.LOGITS, linear(g, last, head), "float32", ["batch", "logit_rows", spec.vocab_size])


def _model(g: GraphBuilder) -> ir.Model:
    used = sorted({node.op_type for node in g.nodes if node.domain == DOMAIN})
    functions = [OPERATORS[name].function() for name in used]
    return g.model(functions, [DOMAIN] if functions else [])
