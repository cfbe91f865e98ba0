"""Nodes for the kernels of `mtp_engines.kernels`: each does what ONNX Runtime needs several operators for.

What a row gives never depends on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering.factors import packed
from mtp_plugins.graph import Axis, GraphBuilder
from mtp_plugins.rotated_weight.reference import rotation

if TYPE_CHECKING:
    from mtp_engines.lowering.products import Matrix

ROWS = ("batch", "rows")
"""The leading axes of what a graph computes for its tokens."""
KERNELS = "mtp.kernels"
"""Domain of the operators that the compiled library registers."""


def packed_product(g: GraphBuilder, x: ir.Value, matrix: Matrix, memory: PackedMatrices, axes: list[str]) -> ir.Value:
    """x @ matrix^T, whose axes but the last are called `axes`.

    The graph that comes out holds an address: it is for sessions of this process only.
    """
    product = g.op("PackedProduct", x, domain=KERNELS, matrices=[_pack(matrix, memory)])
    return _shaped([product], [*axes, matrix.shape[0]])[0]


def packed_choice(g: GraphBuilder, x: ir.Value, product: ir.Node) -> tuple[ir.Value, ir.Value]:
    """The column of the greatest product of each row, int64[rows], and a checksum, float32[rows]; products stay inside.

    Args:
        x: float32[rows, columns].
        product: a `PackedProduct` of another graph, whose one matrix it takes.
    """
    (address,) = product.attributes["matrices"].as_ints()
    ids, checksum = g.op_multi("PackedChoice", x, outputs=("ids", "checksum"), domain=KERNELS, matrices=[address])
    for value, kind in ((ids, ir.DataType.INT64), (checksum, ir.DataType.FLOAT)):
        value.type, value.shape = ir.TensorType(kind), ir.Shape(["rows"])
    return ids, checksum


def merge_products(graph: ir.Graph) -> None:
    """One node for all products that meet the same rows, which are then rounded once."""
    together: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "PackedProduct" and (x := node.inputs[0]) is not None:
            together.setdefault(x, []).append(node)
    for x, nodes in together.items():
        if len(nodes) > 1:
            addresses = [address for node in nodes for address in node.attributes["matrices"].as_ints()]
            olds = [node.outputs[0] for node in nodes]
            g = GraphBuilder("products")
            with g.scope(f"{nodes[0].name}.together"):
                outputs = [str(number) for number in range(len(nodes))]
                news = g.op_multi("PackedProduct", x, outputs=outputs, domain=KERNELS, matrices=addresses)
            for old, new in zip(olds, news, strict=True):
                new.type, new.shape = old.type, old.shape
            ir.convenience.replace_nodes_and_values(graph, nodes[0], nodes, g.nodes, olds, news)


def keep(model: ir.Model, memory: PackedMatrices | None) -> ir.Model:
    """Let the matrices live as long as the model that has their addresses."""
    model.meta["packed matrices"] = memory
    return model


def gated_delta(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """`GatedDelta` as one node."""
    past = node.inputs[5]
    assert past is not None and past.shape is not None
    heads, key_dim = node.attributes["num_key_heads"].as_int(), past.shape[2]
    assert isinstance(key_dim, int)
    names_ = ("output", "present", "unit_key")
    results = g.op_multi("DeltaRule", *node.inputs, outputs=names_, domain=KERNELS, key_heads=heads, key_dim=key_dim)
    _, value_heads, _, value_dim = past.shape
    assert isinstance(value_heads, int) and isinstance(value_dim, int)
    shapes = ([*ROWS, value_heads * value_dim], [*past.shape], [*ROWS, heads * key_dim])
    return _shaped(results, *shapes)


def causal_conv_state(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """`CausalConvState` as one node."""
    x, weight, past = node.inputs
    assert weight is not None and weight.shape is not None and past is not None and past.shape is not None
    # Folded when the session is opened.
    by_tap = g.op("Transpose", g.op("Squeeze", weight, g.constant([1])), perm=[1, 0])
    results = g.op_multi("ShortConvolution", x, by_tap, past, outputs=("output", "present"), domain=KERNELS)
    return _shaped(results, [*ROWS, weight.shape[0]], [*past.shape])


def cached_attention(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """`CachedAttention` as one node."""
    heads, kv_heads = (node.attributes[name].as_int() for name in ("num_heads", "num_kv_heads"))
    return _attend(g, node.inputs, heads, kv_heads)


def latent_attention(g: GraphBuilder, node: ir.Node) -> list[ir.Value]:
    """`LatentAttention` as one node, whose key and value are one cache; the third result is that cache again."""
    query, rows, past, past_length = node.inputs
    return _attend(g, (query, rows, rows, past, past, past_length), node.attributes["num_heads"].as_int(), 1)


def _attend(g: GraphBuilder, inputs: Sequence[ir.Value | None], heads: int, kv_heads: int) -> list[ir.Value]:
    past = inputs[3]
    assert past is not None and past.shape is not None
    width = past.shape[3]
    assert isinstance(width, int)
    outputs = ("output", "present_key", "present_value")
    output, *presents = g.op_multi(
        "CachedAttention", *inputs, outputs=outputs, domain=KERNELS, num_heads=heads, num_kv_heads=kv_heads
    )
    return [*_shaped([output], [*ROWS, heads * width]), *presents]


def forget_sizes(graph: ir.Graph) -> None:
    """Take back what `_shaped` says: in the graph of a draft head some values have other rows than its tokens."""
    for node in graph:
        if node.domain == KERNELS:
            for value in node.outputs:
                if not value.is_graph_output():
                    value.shape = None


def _shaped(values: list[ir.Value], *shapes: Sequence[Any]) -> list[ir.Value]:
    """Sizes of what a kernel gives, which nobody infers: without them buffers are not used again within a run."""
    for value, shape in zip(values, shapes, strict=True):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
    return values


def commit_model(spec: ModelSpec) -> ir.Model:
    """States and factors of every gated delta layer, and accepted_rows, int64[batch] -> new states."""
    g = GraphBuilder("commit")
    counts = g.input(names.ACCEPTED_ROWS, "int64", ["batch"])
    for index, mixer in spec.delta_layers():
        width = sum(mixer.factor_widths.values())
        shape: list[Axis] = ["batch", mixer.value_heads, mixer.key_head_dim, mixer.value_head_dim]
        conv_shape: list[Axis] = ["batch", mixer.conv_kernel - 1, mixer.conv_width]
        with g.scope(f"layers.{index}"):
            state, conv = g.op_multi(
                "DeltaCommit",
                g.input(packed(index), "float32", ["batch", "rows", width]),
                g.input(names.past_recurrent(index), "float32", shape),
                g.input(names.past_conv(index), "float32", conv_shape),
                counts,
                outputs=("state", "conv"),
                domain=KERNELS,
                key_heads=mixer.key_heads,
                key_dim=mixer.key_head_dim,
            )
        g.output(names.present_recurrent(index), state, "float32", shape)
        g.output(names.present_conv(index), conv, "float32", conv_shape)
    return g.model(domains=[KERNELS])


def _pack(matrix: Matrix, memory: PackedMatrices) -> int:
    # What was mapped is let go with these arrays.
    integers, *others = (_read(value.const_value) for value in matrix.tensors)
    if matrix.storage == "whole":
        return memory.whole(integers)
    if matrix.storage == "blocks":
        return memory.blocks(integers, others[0], matrix.shape[1])
    run = len(rotation(matrix.shape[1]))
    return memory.rotated(integers, others[0], run, by_rows=matrix.storage == "rotated rows")


def _read(tensor: ir.TensorProtocol | None) -> npt.NDArray[Any]:
    """The numbers; those of a file are mapped by ourselves, since onnx_ir refuses files with several hard links."""
    assert tensor is not None
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor.numpy()
    shape = tensor.shape.numpy()
    return np.memmap(tensor.path, tensor.dtype.numpy(), "r", tensor.offset or 0, shape)
