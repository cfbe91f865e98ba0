"""Lowering for TensorRT, the last step: nodes of the domain `mtp` become nodes that its parser gives to plugins.

The parser finds a plugin by the node's type and two attributes, whatever its domain is; functions in the model
would come first. The plugins are those of `mtp_plugins.tensorrt_plugins.registry`; what has none becomes its body.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import IdentityEliminationPass, InlinePass

from mtp_engines.errors import BuildError
from mtp_engines.lowering.unused import drop_unused
from mtp_plugins.graph import DOMAIN, OPSET, GraphBuilder
from mtp_plugins.tensorrt_plugins.declaration import VERSION
from mtp_plugins.tensorrt_plugins.registry import PLUGINS

_PARTIALS = ("partial_max", "partial_sum", "partial_output")
_ELEMENTS = {ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}


def lower_tensorrt(model: ir.Model) -> ir.Model:
    """Replace operators by plugins; the model is changed and returned.

    Args:
        model: what `lower_paged` makes, with the bodies of its operators.

    Raises:
        BuildError: a node has neither a plugin nor a body, or its types are not known.
    """
    for identifier in list(model.functions):
        if identifier[1] in {*PLUGINS, "PagedAttention"}:
            del model.functions[identifier]
    InlinePass()(model)
    # What a plugin writes in place has to be an output of the graph itself.
    IdentityEliminationPass()(model)
    graph = model.graph
    for node in list(graph):
        if node.domain != DOMAIN:
            continue
        if node.op_type == "PagedAttention":
            _attention(graph, node)
        elif node.op_type == "SkinnyProduct":
            _product(node)
        elif node.op_type in PLUGINS:
            _mark(node)
        else:
            raise BuildError(
                f"The graph has a node {node.name} of {DOMAIN}::{node.op_type}, for which TensorRT has no plugin, "
                "and the model no body. Lower the graph for a GPU first, or build for another backend."
            )
    drop_unused(graph)
    model.functions.clear()
    graph.opset_imports.clear()
    graph.opset_imports.update({"": OPSET, DOMAIN: 1})
    return model


def _mark(node: ir.Node) -> None:
    """Make a node one that the parser gives to the plugin of its name, compiled ahead of time."""
    for attribute in (
        ir.AttrString("plugin_namespace", DOMAIN),
        ir.AttrString("plugin_version", VERSION),
        ir.AttrInt64("aot", 1),
    ):
        node.attributes.add(attribute)


def _product(node: ir.Node) -> None:
    to = node.attributes.pop("to", None)
    if to is None:
        raise BuildError(f"The node {node.name} has no `to`, the type of its output. Lower the graph again.")
    node.attributes.add(ir.AttrString("output_type", _element(node, ir.DataType(to.as_int()))))
    _mark(node)


def _attention(graph: ir.Graph, node: ir.Node) -> None:
    """Two plugins, since one is a single launch: the second reads what the first leaves."""
    query, key_pages, value_pages, table, lengths = node.inputs
    pool = _pool(key_pages)
    if pool is None or pool.shape is None or pool.dtype is None:
        raise BuildError(
            f"The pages of the node {node.name} have no type or shape, from which the type of its output would follow. "
            "Give the graph's inputs types and shapes."
        )
    scale = node.attributes.get("scale")
    if scale is None and not isinstance(pool.shape[3], int):
        raise BuildError(
            f"The node {node.name} has no scale, and the width of its heads is open. Give it one of the two."
        )
    builder = GraphBuilder(node.op_type)
    with builder.scope(node.name or node.op_type):
        partials = builder.op_multi(
            "PagedAttentionPartial",
            *(query, key_pages, value_pages, table, lengths),
            outputs=_PARTIALS,
            domain=DOMAIN,
            scale=float(pool.shape[3]) ** -0.5 if scale is None else scale.as_float(),  # type: ignore[arg-type]
        )
        output = builder.op(
            "PagedAttentionCombine", *partials, lengths, domain=DOMAIN, output_type=_element(node, pool.dtype)
        )
    for new in builder.nodes:
        _mark(new)
    ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, list(node.outputs), [output])


def _pool(pages: ir.Value | None) -> ir.Value | None:
    """The graph's input that holds the pages, found through the nodes that write into it."""
    while pages is not None and (writer := pages.producer()) is not None:
        if writer.op_type != "PagedKvAppend":
            break
        pages = writer.inputs[2 + list(writer.outputs).index(pages)]
    return pages


def _element(node: ir.Node, dtype: ir.DataType) -> str:
    if dtype not in _ELEMENTS:
        raise BuildError(
            f"The node {node.name} computes in {dtype.name}; {', '.join(_ELEMENTS.values())} were expected."
        )
    return _ELEMENTS[dtype]
