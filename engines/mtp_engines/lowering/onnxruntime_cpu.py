"""Lowering for ONNX Runtime on a CPU: contrib kernels in a form whose rows do not depend on their number."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from mtp_engines.contracts.model import AttentionSpec, ModelSpec
from mtp_engines.errors import BuildError
from mtp_engines.lowering import rules
from mtp_engines.lowering.unused import drop_unused
from mtp_plugins.graph import CONTRIB, DOMAIN, OPSET, GraphBuilder

Rule = Callable[[GraphBuilder, ir.Node], list[ir.Value]]

_RULES: dict[str, Rule] = {
    "CachedAttention": rules.cached_attention,
    "CausalConvState": rules.causal_conv_state,
    "DeltaGate": rules.delta_gate,
    "GatedDelta": rules.gated_delta,
}


def lower(model: ir.Model) -> ir.Model:
    """Replace every canonical node by kernels of ONNX Runtime; the model is changed and returned."""
    graph = model.graph
    for node in list(graph):
        if node.domain == DOMAIN:
            _replace(graph, node, _RULES[node.op_type])
        elif node.op_type == "MatMul" and _transposed_weight(node) is not None:
            _replace(graph, node, rules.linear)
    drop_unused(graph)
    graph.opset_imports.clear()
    graph.opset_imports.update({"": OPSET, CONTRIB: 1})
    model.functions.clear()
    return model


def refuse_unsupported(spec: ModelSpec) -> None:
    """Refuse sizes that a kernel of this backend does not take.

    Raises:
        BuildError: names the size, its value and what the kernel needs.
    """
    mixers = [mixer for _, mixer in spec.attention_layers()]
    if spec.mtp is not None and isinstance(spec.mtp.layer.mixer, AttentionSpec):
        mixers.append(spec.mtp.layer.mixer)
    for mixer in mixers:
        if mixer.head_dim % 8:
            raise BuildError(
                f"The model has attention heads of width {mixer.head_dim}; GroupQueryAttention of ONNX Runtime takes "
                "multiples of 8. This model cannot be built for a CPU."
            )


def _transposed_weight(node: ir.Node) -> ir.Value | None:
    weight = node.inputs[1]
    producer = weight.producer() if weight is not None else None
    return weight if producer is not None and producer.op_type == "Transpose" else None


def _replace(graph: ir.Graph, node: ir.Node, rule: Rule) -> None:
    builder = GraphBuilder(node.op_type)
    with builder.scope(node.name or node.op_type):
        results = rule(builder, node)
    ir.convenience.replace_nodes_and_values(graph, node, [node], builder.nodes, list(node.outputs), results)
