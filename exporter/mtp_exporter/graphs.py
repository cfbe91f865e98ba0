"""The canonical graphs of a model: the backbone, and one for each trained depth of the draft head."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import LayerSpec, ModelSpec, MtpSpec
from mtp_exporter.layers.basic import linear
from mtp_exporter.layers.decoder import ROWS, Decoder
from mtp_exporter.layers.weights import Weights
from mtp_exporter.storing.weights import Stored
from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.registry import OPERATORS

Tensors = Mapping[str, Stored]


def head_role(depth: int) -> str:
    """What the roles of one trained depth of the draft head start with."""
    return f"mtp.{depth}." if depth else "mtp."


def backbone_graph(spec: ModelSpec, limits: Limits, tensors: Tensors) -> ir.Model:
    """input_ids -> logits of the last rows, hidden states of all rows, taps, caches, states, replay factors."""
    g = GraphBuilder("backbone")
    w = Weights(g, tensors)
    input_ids = g.input(names.INPUT_IDS, "int64", ROWS)
    decoder = Decoder(g, spec.layers, limits, spec.norm_epsilon)
    logit_rows = g.input(names.LOGIT_ROWS, "int64", [1])
    residuals = [w.rows("embedding", input_ids)]
    for index, layer in enumerate(spec.layers):
        with g.scope(f"layers.{index}"):
            residuals.append(decoder.layer(residuals[-1], w.below(f"layers.{index}."), layer, index))
    for index, value in enumerate(residuals):
        g.label(names.residual(index), value, "float32", [*ROWS, spec.hidden_size])
    hidden = decoder.norm(residuals[-1], w["final_norm"])
    if spec.mtp is not None and spec.mtp.taps:
        tap = g.op("Concat", *(residuals[index] for index in spec.mtp.taps), axis=-1)
        g.output(names.TAP, tap, "float32", [*ROWS, spec.tap_width])
    g.output(names.HIDDEN, hidden, "float32", [*ROWS, spec.hidden_size])
    _logits(g, hidden, w["head"], logit_rows, spec.vocab_size)
    return _model(g)


def mtp_graph(spec: ModelSpec, limits: Limits, tensors: Tensors, depth: int = 0) -> ir.Model:
    """input_ids and the target's hidden states -> logits of the last rows, the head's own states, its cache.

    Row p takes the token after position p (depth j: the one j further on) and the target's hidden state of
    position p, or the head's own output in a chained step.
    """
    mtp = spec.mtp
    assert mtp is not None
    g = GraphBuilder("mtp")
    w = Weights(g, tensors)
    own = w.below(head_role(depth))
    layer = mtp.layers[depth]
    input_ids = g.input(names.INPUT_IDS, "int64", ROWS)
    stages = _Stages(g, mtp.hidden_size)
    hidden = _hidden_input(g, spec, mtp, own, stages)
    decoder = Decoder(g, (layer,), limits, mtp.norm_epsilon or spec.norm_epsilon)
    logit_rows = g.input(names.LOGIT_ROWS, "int64", [1])
    embedding = w.rows("mtp.embedding" if mtp.own_embedding else "embedding", input_ids)
    if mtp.input_norms:
        embedding = stages.keep("embedding_norm", decoder.norm(embedding, own["embedding_norm"]))
        normed = stages.keep("hidden_norm", decoder.norm(hidden, own["hidden_norm"]))
    else:
        normed = hidden
    # The order the head was trained on; swapped, it still runs and drafts noise.
    pair = (embedding, normed) if mtp.concat == "embedding_first" else (normed, embedding)
    joined: ir.Value | None = stages.keep("concatenation", g.op("Concat", *pair, axis=-1), 2 * mtp.hidden_size)
    if mtp.join == "projection":
        assert joined is not None
        x = linear(g, joined, own["projection"])
        x = stages.keep("projection", g.op("Add", x, own["projection_bias"]) if mtp.join_bias else x)
        joined = None
    else:
        x = normed if mtp.residual_normed else hidden
    with g.scope("layer"):
        x = _head_layer(g, stages, decoder, own.below("layer."), layer, x, joined)
    out = stages.keep("output", decoder.norm(x, own["output_norm"])) if mtp.output_norm else x
    g.output(names.HIDDEN_OUT, out, "float32", [*ROWS, mtp.hidden_size])
    if mtp.chain == "residual" and mtp.output_norm:
        g.output(names.CHAIN_OUT, x, "float32", [*ROWS, mtp.hidden_size])
    _head_logits(g, spec, mtp, w, out, logit_rows)
    return _model(g)


class _Stages:
    """Names values of the head, so that tools can cut the graph there."""

    def __init__(self, g: GraphBuilder, width: int) -> None:
        self._g, self._width = g, width

    def keep(self, name: str, value: ir.Value, width: int | None = None) -> ir.Value:
        """The value under the name of its stage."""
        self._g.label(names.stage(name), value, "float32", [*ROWS, width or self._width])
        return value


def _hidden_input(g: GraphBuilder, spec: ModelSpec, mtp: MtpSpec, w: Weights, stages: _Stages) -> ir.Value:
    """The target's rows, then the head's own; where only the former go through a matrix, both are inputs."""
    tap = g.input(names.tap_of(mtp), "float32", ["batch", "tap_rows" if mtp.tap_projection else "rows", spec.tap_width])
    if not mtp.tap_projection:
        return tap
    chained = g.input(names.CHAIN, "float32", ["batch", "chain_rows", mtp.hidden_size])
    return stages.keep("projection", g.op("Concat", linear(g, tap, w["tap_projection"]), chained, axis=1))


def _head_layer(
    g: GraphBuilder,
    stages: _Stages,
    decoder: Decoder,
    w: Weights,
    layer: LayerSpec,
    x: ir.Value,
    attention_input: ir.Value | None,
) -> ir.Value:
    """A decoder layer with every stage named; `attention_input` None takes the normed x."""
    if attention_input is None:
        attention_input = x
        if layer.input_norm:
            attention_input = stages.keep("attention_input", decoder.norm(x, w["input_norm"]))
    mixed = stages.keep("attention", decoder.mixer(attention_input, w.below("mixer."), layer.mixer, 0))
    x = stages.keep("first_residual", g.op("Add", x, mixed))
    normed = stages.keep("mlp_input", decoder.norm(x, w["post_norm"]))
    mlp = stages.keep("mlp", decoder.mlp(normed, w.below("mlp."), layer.mlp, "head"))
    return stages.keep("second_residual", g.op("Add", x, mlp))


def _head_logits(
    g: GraphBuilder, spec: ModelSpec, mtp: MtpSpec, w: Weights, hidden: ir.Value, logit_rows: ir.Value
) -> None:
    vocab = mtp.draft_vocab_size or spec.vocab_size
    logits = _logits(g, hidden, w["mtp.head" if mtp.own_head else "head"], logit_rows, vocab)
    if mtp.has_table:
        ids = g.op("Gather", w["mtp.ids"], g.op("ArgMax", logits, axis=-1, keepdims=0), axis=0)
        g.output(names.DRAFT_IDS, ids, "int64", ["batch", "logit_rows"])


def _logits(g: GraphBuilder, hidden: ir.Value, head: ir.Value, logit_rows: ir.Value, vocab_size: int) -> ir.Value:
    end = g.constant([9223372036854775807])
    start = g.op("Sub", g.op("Shape", hidden, start=1, end=2), logit_rows)
    logits = linear(g, g.op("Slice", hidden, start, end, g.constant([1])), head)
    g.output(names.LOGITS, logits, "float32", ["batch", "logit_rows", vocab_size])
    return logits


def _model(g: GraphBuilder) -> ir.Model:
    used = sorted({node.op_type for node in g.nodes if node.domain == DOMAIN})
    functions = [OPERATORS[name].function() for name in used]
    return g.model(functions, [DOMAIN] if functions else [])
