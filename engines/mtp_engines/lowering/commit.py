"""The commit graph: repeat the accepted rows of a verify on the committed state, without any weight.

A gated delta state cannot be cut back. It is not copied for each row either: a verify leaves the
committed state alone and emits, for each row, what the recurrence consumed (a few KB). The commit
runs the recurrence over the accepted rows only. A row with decay 0 and beta 0 is an exact identity,
so sequences of a batch may accept different numbers of rows in one call; a lone one is given just those
that it accepts, and masks nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.contracts.model import GatedDeltaSpec, ModelSpec
from mtp_engines.lowering.convolution import rows_before_next
from mtp_engines.lowering.factors import packed, unpacked
from mtp_plugins.graph import CONTRIB, Axis, GraphBuilder


def commit_model(spec: ModelSpec, *, masked: bool) -> ir.Model:
    """States and factors of every gated delta layer -> new states.

    Args:
        masked: a further input accepted_rows, int64[batch], tells how many of the rows count; else all of them do.
    """
    g = GraphBuilder("commit")
    together = {
        index: g.input(packed(index), "float32", ["batch", "rows", sum(mixer.factor_widths.values())])
        for index, mixer in spec.delta_layers()
    }
    mask = None
    if masked:
        count = g.op("Unsqueeze", g.input(names.ACCEPTED_ROWS, "int64", ["batch"]), g.constant([1]))
        mask = _Mask(kept_rows(g, next(iter(together.values())), count), count)
    for index, mixer in spec.delta_layers():
        with g.scope(f"layers.{index}"):
            _commit_layer(g, index, mixer, unpacked(g, together[index], mixer), mask)
    return g.model(domains=[CONTRIB])


class _Mask(NamedTuple):
    """Which rows count, bool[batch, rows, 1], and how many of each sequence, int64[batch, 1]."""

    kept: ir.Value
    counts: ir.Value


def _commit_layer(
    g: GraphBuilder, index: int, mixer: GatedDeltaSpec, rows: dict[str, ir.Value], mask: _Mask | None
) -> None:
    gates = [rows["decay"], rows["beta"]]
    if mask is not None:
        gates = [g.op("Where", mask.kept, gate, g.constant(0.0, "float32")) for gate in gates]
    state_shape: list[Axis] = ["batch", mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim]
    state = g.input(names.past_recurrent(index), "float32", state_shape)
    _, present = g.op_multi(
        "LinearAttention",
        rows["key"],
        rows["key"],
        rows["value"],
        state,
        *gates,
        outputs=("unused", "present"),
        domain=CONTRIB,
        q_num_heads=mixer.key_heads,
        kv_num_heads=mixer.value_heads,
        update_rule="gated_delta",
    )
    g.output(names.present_recurrent(index), present, "float32", state_shape)
    conv_shape: list[Axis] = ["batch", mixer.conv_kernel - 1, mixer.conv_width]
    past = g.input(names.past_conv(index), "float32", conv_shape)
    if mask is None:
        last = rows_before_next(g, g.op("Concat", past, rows["conv"], axis=1), mixer.conv_kernel - 1)
    else:
        last = last_rows(g, past, rows["conv"], mask.counts, mixer.conv_kernel - 1, mixer.conv_width)
    g.output(names.present_conv(index), last, "float32", conv_shape)


def kept_rows(g: GraphBuilder, factor: ir.Value, count: ir.Value) -> ir.Value:
    """bool[batch, rows, 1]: row < accepted, int64[batch, 1]; `factor` has the rows."""
    rows = g.op("Range", g.constant(0), g.op("Squeeze", g.op("Shape", factor, start=1, end=2)), g.constant(1))
    return g.op("Unsqueeze", g.op("Less", rows, count), g.constant([2]))


def last_rows(g: GraphBuilder, past: ir.Value, rows: ir.Value, count: ir.Value, length: int, width: int) -> ir.Value:
    """The `length` raw rows that end with the last accepted one, of `past` and the rows behind it."""
    offsets = g.constant(list(range(length)))
    index = g.op("Unsqueeze", g.op("Add", count, offsets), g.constant([2]))
    shape = g.op("Concat", g.op("Shape", index, start=0, end=2), g.constant([width]), axis=0)
    return g.op("GatherElements", g.op("Concat", past, rows, axis=1), g.op("Expand", index, shape), axis=1)
