"""Attention over caches on a CPU: query heads that share a cache stand as rows of one head, which reads it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mtp_engines.lowering.caches import stored_width
from mtp_engines.lowering.rows import with_twin
from mtp_engines.lowering.rules import group_query, int32
from mtp_plugins.graph import GraphBuilder

MOST_FOLDED_HEADS = 8
MOST_FOLDED_ROWS = 64
"""More rows do not fit one block of the kernel at a width of 256, and a block reads the cache for itself."""


def cached_attention(g: GraphBuilder, node: ir.Node, threads: int) -> list[ir.Value]:
    """GroupQueryAttention over two caches."""
    query, key, value, past_key, past_value, past_length = node.inputs
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "num_kv_heads"))
    return _attend(g, (query, key, value), (past_key, past_value), past_length, (heads, kv_heads), threads)


def latent_attention(g: GraphBuilder, node: ir.Node, threads: int) -> list[ir.Value]:
    """GroupQueryAttention whose key and value are one cache; the third result is that cache again."""
    query, rows, past, past_length = node.inputs
    heads = (node.attributes["num_heads"].as_int(), 1)
    return _attend(g, (query, rows, rows), (past, past), past_length, heads, threads)


def folded_heads(heads: int, kv_heads: int, threads: int) -> int:
    """How many query heads of a group become rows of one head.

    The kernel gives every thread whole heads, so as many are left as there are threads.
    """
    group = heads // kv_heads
    factors = range(2, min(group, MOST_FOLDED_HEADS) + 1)
    return max((f for f in factors if group % f == 0 and heads // f >= threads), default=1)


@dataclass(frozen=True)
class _Call:
    """What both forms of one attention read; query, key and value are as wide as the cache stores them."""

    inputs: tuple[ir.Value | None, ir.Value | None, ir.Value | None]
    pasts: tuple[ir.Value | None, ir.Value | None]
    past_length: ir.Value | None
    rows: ir.Value
    heads: tuple[int, int]
    stored: int
    scale: float


def _attend(
    g: GraphBuilder,
    inputs: tuple[ir.Value | None, ir.Value | None, ir.Value | None],
    pasts: tuple[ir.Value | None, ir.Value | None],
    past_length: ir.Value | None,
    heads: tuple[int, int],
    threads: int,
) -> list[ir.Value]:
    """Few rows with their heads folded, many row by row: both round alike (decision 0021)."""
    past = pasts[0]
    assert past is not None and past.shape is not None
    dim = past.shape[3]
    assert isinstance(dim, int)
    query, key, value = (
        _padded(g, x, count, dim) for x, count in zip(inputs, (heads[0], heads[1], heads[1]), strict=True)
    )
    rows = g.op("Shape", query, start=1, end=2)
    call = _Call((query, key, value), pasts, past_length, rows, heads, stored_width(dim), dim**-0.5)
    fold = folded_heads(*heads, threads)
    if fold == 1:
        results = _unfolded(g, call)
    else:
        room = g.op("Sub", g.op("Shape", past, start=2, end=3), g.op("ReduceMax", past_length))
        most = g.op("Min", room, g.constant([MOST_FOLDED_ROWS]))
        # An odd number of folded rows gets one more.
        fits = g.op("Less" if fold % 2 else "LessOrEqual", g.op("Mul", rows, g.constant([fold])), most)
        results = g.op_multi(
            "If",
            fits,
            outputs=("output", "present_key", "present_value"),
            then_branch=_branch(call, fold),
            else_branch=_branch(call, 1),
        )
    return [_unpadded(g, results[0], heads[0], dim), *results[1:]]


def _branch(call: _Call, fold: int) -> ir.Graph:
    """One way through the attention, as a graph that reads the values around it."""
    name = "folded" if fold > 1 else "unfolded"
    g = GraphBuilder(name)
    with g.scope(f"{call.rows.name}.{name}"):
        g.outputs.extend(_folded(g, call, fold) if fold > 1 else _unfolded(g, call))
    for output in g.outputs:
        output.type = ir.TensorType(ir.DataType.FLOAT)
    return g.graph()


def _unfolded(g: GraphBuilder, call: _Call) -> list[ir.Value]:
    """An even number of query rows in each head, since a lone row, or one behind whole blocks, rounds differently.

    The twin of an odd row writes one spare cache row past the committed length and is cut off.
    """
    width = _even(g, call.rows)
    total = g.op("Add", call.past_length, width)
    twins = [with_twin(g, x, call.rows, width, axis=1) for x in call.inputs]
    output, *presents = _group_query(g, call, twins, total, width, call.heads[0])
    return [_first(g, output, call.rows), *presents]


def _folded(g: GraphBuilder, call: _Call, fold: int) -> list[ir.Value]:
    """Row m of head h is row m * fold + h of one head; zeros behind the new keys and values make as many rows of them.

    The kernel lets a row see as many new rows as stand before it, which is never too few; the bias hides the others.
    """
    query, key, value = call.inputs
    left = call.heads[0] // fold
    apart = g.op("Reshape", query, g.constant([0, 0, left, fold, call.stored]))
    together = g.op("Transpose", apart, perm=[0, 1, 3, 2, 4])
    wide = g.op("Mul", call.rows, g.constant([fold]))
    width = _even(g, wide) if fold % 2 else wide
    rows = _extended(g, g.op("Reshape", together, g.constant([0, -1, left * call.stored])), wide, width)
    total = g.op("Add", call.past_length, width)
    output, *presents = _group_query(
        g,
        call,
        [rows, *(_extended(g, x, call.rows, width) for x in (key, value))],
        total,
        width,
        left,
        _bias(g, call.past_length, total, width, fold),
    )
    apart = g.op("Reshape", _first(g, output, wide), g.constant([0, -1, fold, left, call.stored]))
    together = g.op("Transpose", apart, perm=[0, 1, 3, 2, 4])
    return [g.op("Reshape", together, g.constant([0, -1, call.heads[0] * call.stored])), *presents]


def _bias(g: GraphBuilder, past_length: ir.Value | None, total: ir.Value, width: ir.Value, fold: int) -> ir.Value:
    """float32[batch, 1, width, columns]: 0 up to the position of each folded row, the lowest number behind it."""
    zero, one = g.constant(0), g.constant(1)
    columns = g.op("Range", zero, g.op("ReduceMax", total, keepdims=0), one)
    row = g.op("Div", g.op("Range", zero, g.op("Squeeze", width), one), g.constant(fold))
    position = g.op("Add", g.op("Unsqueeze", past_length, g.constant([1])), row)
    seen = g.op("LessOrEqual", columns, g.op("Unsqueeze", position, g.constant([1, 3])))
    return g.op("Where", seen, g.constant(0.0, "float32"), g.constant(np.finfo(np.float32).min, "float32"))


def _group_query(
    g: GraphBuilder,
    call: _Call,
    inputs: Sequence[ir.Value | None],
    total: ir.Value,
    width: ir.Value,
    heads: int,
    bias: ir.Value | None = None,
) -> list[ir.Value]:
    return group_query(
        g,
        inputs,
        call.pasts,
        int32(g, g.op("Sub", total, g.constant([1]))),
        int32(g, g.op("ReduceMax", total, keepdims=0)),
        # The right-padding input is what admits several sequences with different past lengths.
        int32(g, g.op("Expand", width, g.op("Shape", call.past_length))),
        bias,
        heads=(heads, call.heads[1]),
        scale=call.scale,
    )


def _even(g: GraphBuilder, rows: ir.Value) -> ir.Value:
    return g.op("Add", rows, g.op("Mod", rows, g.constant([2])))


def _first(g: GraphBuilder, x: ir.Value, rows: ir.Value) -> ir.Value:
    return g.op("Slice", x, g.constant([0]), rows, g.constant([1]))


def _extended(g: GraphBuilder, x: ir.Value | None, rows: ir.Value, width: ir.Value) -> ir.Value | None:
    """Zero rows behind the `rows` of axis 1, up to `width`."""
    if rows is width:
        return x
    pads = g.op("Concat", g.constant([0]), g.op("Sub", width, rows), axis=0)
    return g.op("Pad", x, pads, None, g.constant([1]))


def _padded(g: GraphBuilder, x: ir.Value | None, heads: int, dim: int) -> ir.Value | None:
    """[batch, rows, heads * dim] with zeros behind each head, as wide as the cache stores it."""
    stored = stored_width(dim)
    if stored == dim:
        return x
    split = g.op("Reshape", x, g.constant([0, 0, heads, dim]))
    wide = g.op("Pad", split, g.constant([0, stored - dim]), None, g.constant([3]))
    return g.op("Reshape", wide, g.constant([0, 0, heads * stored]))


def _unpadded(g: GraphBuilder, x: ir.Value, heads: int, dim: int) -> ir.Value:
    stored = stored_width(dim)
    if stored == dim:
        return x
    split = g.op("Reshape", x, g.constant([0, 0, heads, stored]))
    narrow = g.op("Slice", split, g.constant([0]), g.constant([dim]), g.constant([3]))
    return g.op("Reshape", narrow, g.constant([0, 0, heads * dim]))
