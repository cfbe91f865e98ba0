"""Lowering for ONNX Runtime on a GPU: contrib kernels over dense caches, states that are committed by the next call.

Kernels are those that ONNX Runtime 1.31 has for CUDA. Nothing in the graph is read by the host: sizes come from
shapes, so a run only enqueues.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import IdentityEliminationPass, InlinePass

from mtp_engines.errors import BundleError
from mtp_engines.lowering import rules
from mtp_engines.lowering.commit import kept_rows, last_rows
from mtp_engines.lowering.deferred import (
    INT32,
    Deferred,
    Rule,
    dimension,
    refuse_latent_attention,
    replace,
)
from mtp_engines.lowering.products import Matrix, Products, matrix_of
from mtp_engines.lowering.unused import drop_unused
from mtp_plugins.graph import CONTRIB, DOMAIN, OPSET, GraphBuilder

_KERNEL_UNIT, _WIDEST_HEAD = 8, 256


def lower_onnxruntime_cuda(model: ir.Model, staged_rows: int, *, grouped: bool) -> ir.Model:
    """Replace canonical nodes by contrib kernels; the model is changed and returned.

    Args:
        model: a canonical graph without its vocabulary head, in the precision it will run in.
        staged_rows: how many rows of a call can wait for a decision: the widest verify.
        grouped: attention by GroupQueryAttention, which on a GPU takes half types only, and several rows behind a
            cache for one sequence only; otherwise by its body, TensorScatter and Attention with a mask.

    Raises:
        BundleError: a layer has no form for this backend.
    """
    graph = model.graph
    refuse_latent_attention(graph)
    if any(node.op_type == "RoutedExperts" for node in graph):
        raise BundleError(
            "This model has routed experts, for which ONNX Runtime has no kernel on a GPU that takes them as this "
            "bundle stores them. Run the bundle with --backend onnxruntime, or with --backend torch."
        )
    lowering = _Cuda(graph, staged_rows, grouped=grouped)
    for node in list(graph):
        if node.domain == DOMAIN and node.op_type in lowering.rules:
            replace(graph, node, lowering.rules[node.op_type])
    # What has no kernel runs by its body. Identities go, since a cache update must be a graph output to be in place.
    InlinePass()(model)
    IdentityEliminationPass()(model)
    model.functions.clear()
    return contrib_products(model)


def contrib_products(model: ir.Model) -> ir.Model:
    """Products with stored matrices as they lie: a transpose would be folded into a copy of each.

    The model is changed and returned.
    """
    for node in list(model.graph):
        matrix = matrix_of(node) if node.op_type == "MatMul" else None
        if matrix is not None:
            replace(model.graph, node, partial(_product, matrix=matrix))
    drop_unused(model.graph)
    model.graph.opset_imports.clear()
    model.graph.opset_imports.update({"": OPSET, CONTRIB: 1})
    return model


def _product(g: GraphBuilder, node: ir.Node, matrix: Matrix) -> list[ir.Value]:
    x = node.inputs[0]
    assert x is not None
    return [Products().add(g, x, matrix, axis=1)]


class _Cuda:
    """The rules, and what their results have in common."""

    def __init__(self, graph: ir.Graph, staged_rows: int, *, grouped: bool) -> None:
        self._deferred, self._staged_rows, self._grouped = Deferred(graph, staged_rows), staged_rows, grouped
        # Counts, masks and lengths are the same in every layer; the first one makes them.
        self._counts: list[ir.Value] = []
        self._masks: dict[str, ir.Value] = {}
        self._length: ir.Value | None = None
        self._last: ir.Value | None = None
        self.rules: dict[str, Rule] = {
            "CachedAttention": self.attention,
            "CausalConvState": self.conv,
            "DeltaGate": rules.delta_gate,
            "GatedDelta": self.delta,
        }

    def attention(self, g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
        """GroupQueryAttention over two caches in place, or the body."""
        query, key, value, past_key, past_value, past_length = node.inputs
        assert past_key is not None and past_length is not None
        past_length.type = INT32
        dim = dimension(past_key, 3)
        if not self._grouped or dim % _KERNEL_UNIT or dim > _WIDEST_HEAD:
            return self._attention_body(g, node, past_length)
        heads = (node.attributes["num_heads"].as_int(), node.attributes["num_kv_heads"].as_int())
        # The host wants a bound of the lengths, which it does not know; the capacity is one that costs no wait.
        total = rules.int32(g, g.op("Squeeze", g.op("Shape", past_key, start=2, end=3)))
        return rules.group_query(
            g,
            (query, key, value),
            (past_key, past_value),
            self._last_position(g, query, past_length),
            total,
            heads=heads,
            scale=dim**-0.5,
        )

    def _last_position(self, g: GraphBuilder, query: ir.Value | None, past_length: ir.Value) -> ir.Value:
        """int32[batch], the position of each sequence's last row."""
        if self._last is None:
            rows = g.op("Range", g.constant(0), g.op("Squeeze", g.op("Shape", query, start=1, end=2)), g.constant(1))
            # From a row's number, not from their count: that lies on the host, where ONNX Runtime would then add the
            # lengths, and wait for them.
            offset = g.op("Slice", rows, g.constant([-1]), g.constant([np.iinfo(np.int64).max]), g.constant([0]))
            self._last = rules.int32(g, g.op("Add", self._int64_length(g, past_length), offset))
        return self._last

    def _attention_body(self, g: GraphBuilder, node: ir.Node, past_length: ir.Value) -> list[ir.Value]:
        return g.op_multi(
            node.op_type,
            *node.inputs[:5],
            self._int64_length(g, past_length),
            outputs=("output", "present_key", "present_value"),
            domain=DOMAIN,
            **{name: node.attributes[name].as_int() for name in ("num_heads", "num_kv_heads")},
        )

    def _int64_length(self, g: GraphBuilder, past_length: ir.Value) -> ir.Value:
        if self._length is None:
            self._length = g.op("Cast", past_length, to=int(ir.DataType.INT64))
        return self._length

    def conv(self, g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
        """The accepted staged rows behind the state, the convolution, and the rows that are kept."""
        x, weight, past = node.inputs
        assert x is not None and past is not None
        staged = self._deferred.conv_rows(past)
        accepted, kept = self._int64_counts(g)
        sizes = dimension(past, 1), dimension(past, 2)
        committed = last_rows(g, past, staged, accepted, *sizes)
        output, _ = g.op_multi(
            "CausalConvWithState",
            *(x, weight, None, committed),
            outputs=("output", "unused"),
            domain=CONTRIB,
            activation="silu",
            channels_last=1,
        )
        present = last_rows(g, committed, x, kept, *sizes)
        self._leave(g, staged, x)
        return [output, present]

    def delta(self, g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
        """The recurrence over the accepted staged rows, over the new ones, and over those that are kept."""
        query, key, value, decay, beta, past = node.inputs
        assert past is not None and value is not None and decay is not None and beta is not None
        heads = (node.attributes["num_key_heads"].as_int(), node.attributes["num_value_heads"].as_int())
        key_dim = dimension(past, 2)
        staged = self._deferred.delta_rows(node)
        accepted, kept = self._int64_counts(g)

        def state_after(state: ir.Value, rows: Sequence[ir.Value], name: str, count: ir.Value) -> ir.Value:
            masked = self._masked(g, rows, name, count)
            return rules.recurrence(g, masked[0], masked, state, heads, key_dim)[1]

        committed = state_after(past, list(staged.values()), "accepted", accepted)
        new = [rules.unit_rows(g, key, heads[0], key_dim), value, decay, beta]
        output, _ = rules.recurrence(g, rules.unit_rows(g, query, heads[0], key_dim), new, committed, heads, key_dim)
        present = state_after(committed, new, "kept", kept)
        for buffer, rows in zip(staged.values(), new, strict=True):
            self._leave(g, buffer, rows)
        return [output, present]

    def _masked(self, g: GraphBuilder, rows: Sequence[ir.Value], name: str, count: ir.Value) -> list[ir.Value]:
        """Rows behind the first `count` as ones that leave a state exactly as it was.

        Decay 0 and beta 0 do; key and value are cleared too, because 0 * inf is not 0.
        """
        if name not in self._masks:
            self._masks[name] = kept_rows(g, rows[2], count)
        zero = g.constant(0.0, "float32")
        return [g.op("Where", self._masks[name], part, zero) for part in rows]

    def _leave(self, g: GraphBuilder, staged: ir.Value, rows: ir.Value) -> None:
        """The first new rows, as many as there is room for; what is behind them means nothing."""
        filled = g.op("Concat", rows, staged, axis=1)
        room = g.constant([self._staged_rows])
        self._deferred.leave(staged, g.op("Slice", filled, g.constant([0]), room, g.constant([1])))

    def _int64_counts(self, g: GraphBuilder) -> list[ir.Value]:
        """int64[batch, 1] each: accepted rows and kept rows."""
        if not self._counts:
            wide = [g.op("Cast", count, to=int(ir.DataType.INT64)) for count in self._deferred.counts()]
            self._counts = [g.op("Unsqueeze", count, g.constant([1])) for count in wide]
        return self._counts
