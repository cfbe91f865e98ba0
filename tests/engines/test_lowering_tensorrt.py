"""A whole model lowered for TensorRT: which plugins it has, and that what they write in place can be bound in place."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
import pytest

from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.paged import lower_paged
from mtp_engines.lowering.precision import Precision, to_precision
from mtp_engines.lowering.tensorrt import lower_tensorrt
from mtp_plugins.graph import DOMAIN
from mtp_plugins.tensorrt_plugins.declaration import Alias
from mtp_plugins.tensorrt_plugins.registry import PLUGINS
from tests.engines.conftest import Case

MARKS = {"plugin_namespace", "plugin_version", "aot"}


def lowered(case: Case, precision: Precision, *, skinny: bool) -> ir.Model:
    """The backbone of a bundle."""
    model = to_precision(ir.load(case.model.bundle.backbone), precision)
    return lower_tensorrt(lower_paged(without_head(model), 6, skinny=skinny))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_node_is_standard_or_a_plugin(case: Case, precision: Precision) -> None:
    model = lowered(case, precision, skinny=True)
    before = ir.load(case.model.bundle.backbone)
    canonical = Counter(node.op_type for node in before.graph if node.domain == DOMAIN)
    found = Counter(node.op_type for node in model.graph if node.domain == DOMAIN)
    assert {node.domain for node in model.graph.all_nodes()} == {"", DOMAIN}
    assert not model.functions
    attention = canonical["CachedAttention"]
    assert attention == found["PagedKvAppend"] == found["PagedAttentionPartial"] == found["PagedAttentionCombine"] > 0
    assert found["DeferredDelta"] == canonical["GatedDelta"] > 0
    assert found["DeferredConv"] == canonical["CausalConvState"] > 0
    assert found["SkinnyProduct"] > 0
    assert not lowered(case, precision, skinny=False).graph.opset_imports.keys() - {"", DOMAIN}


def test_every_plugin_has_its_inputs_outputs_and_attributes(case: Case) -> None:
    for node in lowered(case, "bf16", skinny=True).graph:
        if node.domain == DOMAIN:
            plugin = PLUGINS[node.op_type]
            assert len(node.inputs) == len(plugin.inputs)
            assert len(node.outputs) == len(plugin.outputs)
            assert set(node.attributes) == MARKS | set(plugin.attributes)


def in_place(model: ir.Model) -> dict[str | None, str | None]:
    """Inputs of the graph by the outputs of the graph that lie in their memory."""
    pairs = {}
    for node in model.graph:
        plugin = PLUGINS.get(node.op_type) if node.domain == DOMAIN else None
        for value, shape in zip(node.outputs, plugin.outputs.values() if plugin else (), strict=False):
            if plugin is not None and isinstance(shape, Alias):
                source = node.inputs[list(plugin.inputs).index(shape.input)]
                if source is not None and source.is_graph_input() and value.is_graph_output():
                    pairs[value.name] = source.name
    return pairs


def test_what_is_written_in_place_comes_in_and_goes_out_of_the_graph(case: Case) -> None:
    model = lowered(case, "bf16", skinny=True)
    past = {value.name for value in model.graph.inputs if str(value.name).startswith(("past.", "past_key_values."))}
    pairs = in_place(model)
    assert set(pairs.values()) == past
    assert len(pairs) == len(past) > 2
    behind = next(iter(pairs))
    (output,) = (value for value in model.graph.outputs if value.name == behind)
    model.graph.outputs[list(model.graph.outputs).index(output)] = ir.node("Identity", [output]).outputs[0]
    assert len(in_place(model)) == len(past) - 1, "control: a copy behind the plugin shows"
