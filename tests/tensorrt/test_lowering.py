"""Graphs for TensorRT: what its parser reads off a node, and that the plugins take it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.errors import BuildError
from mtp_engines.lowering.tensorrt import lower_tensorrt
from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.registry import OPERATORS
from mtp_plugins.tensorrt_plugins.registry import PLUGINS
from tests.plugins.workers import Worker
from tests.tensorrt import building
from tests.tensorrt.cases import BY_NAME, SIZES

MARKS = {"plugin_namespace": "mtp", "plugin_version": "1", "aot": 1}
POOL = ["pages", 16, 2, 64]


def attention(
    dtype: ir.DataType = ir.DataType.BFLOAT16, *, pool: list[Any] | None = None, **attributes: float
) -> ir.Model:
    """New rows into pages, and attention over them."""
    g, shape = GraphBuilder("attention"), pool or POOL
    rows = [g.input(name, "float32", ["batch", "rows", width]) for name, width in (("q", 384), ("k", 128), ("v", 128))]
    pages = [g.input(f"past.{name}", "float32", shape) for name in "kv"]
    table = g.input("block_table", "int32", ["batch", "max_pages"])
    lengths = g.input("lengths", "int32", ["batch"])
    for value in (*rows, *pages):
        value.type = ir.TensorType(dtype)
    present = g.op_multi("PagedKvAppend", *rows[1:], *pages, table, lengths, outputs=("k", "v"), domain=DOMAIN)
    output = g.op("PagedAttention", rows[0], *present, table, lengths, domain=DOMAIN, **attributes)
    g.output("output", output, "float32", ["batch", "rows", 384])
    for name, value in zip("kv", present, strict=True):
        g.output(f"present.{name}", value, "float32", shape)
    return g.model([OPERATORS[name].function() for name in ("PagedKvAppend", "PagedAttention")], [DOMAIN])


def product(**attributes: int) -> ir.Model:
    """Rows times a weight."""
    g = GraphBuilder("product")
    x, weight = g.input("x", "float32", ["batch", "rows", 96]), g.constant(np.ones((200, 96)), "float32")
    g.output("y", g.op("SkinnyProduct", x, weight, domain=DOMAIN, **attributes), "float32", ["batch", "rows", 200])
    return g.model([OPERATORS["SkinnyProduct"].function()], [DOMAIN])


def values(node: ir.Node) -> dict[str, Any]:
    """Attributes of a node; strings, numbers and integers."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def plugin_nodes(model: ir.Model) -> dict[str, ir.Node]:
    """Nodes of the domain `mtp` by type."""
    return {node.op_type: node for node in model.graph if node.domain == DOMAIN}


def test_attention_becomes_two_plugins_over_pages_that_another_wrote() -> None:
    model = lower_tensorrt(attention(scale=0.25))
    nodes = plugin_nodes(model)
    append, partial, combine = (nodes[n] for n in ("PagedKvAppend", "PagedAttentionPartial", "PagedAttentionCombine"))
    assert len(nodes) == 3
    assert values(append) == MARKS
    assert values(partial) == {**MARKS, "scale": 0.25}
    assert values(combine) == {**MARKS, "output_type": "bf16"}
    by_name = {value.name: value for value in model.graph.inputs}
    assert list(partial.inputs) == [by_name["q"], *append.outputs, by_name["block_table"], by_name["lengths"]]
    assert list(combine.inputs) == [*partial.outputs, by_name["lengths"]]
    assert model.graph.outputs[0] is combine.outputs[0]
    assert [value.name for value in model.graph.outputs] == ["output", "present.k", "present.v"]
    assert not model.functions, "a function would be taken instead of a plugin"
    for name, node in nodes.items():
        assert (len(node.inputs), len(node.outputs)) == (len(PLUGINS[name].inputs), len(PLUGINS[name].outputs))


def test_a_scale_that_the_node_leaves_out_follows_from_the_pages() -> None:
    assert values(plugin_nodes(lower_tensorrt(attention()))["PagedAttentionPartial"])["scale"] == 64**-0.5
    with pytest.raises(BuildError, match="has no scale, and the width of its heads is open"):
        lower_tensorrt(attention(pool=["pages", 16, 2, "head_dim"]))


@pytest.mark.parametrize(("dtype", "name"), [(ir.DataType.FLOAT, "fp32"), (ir.DataType.FLOAT16, "fp16")])
def test_attention_gives_what_the_pages_hold(dtype: ir.DataType, name: str) -> None:
    assert values(plugin_nodes(lower_tensorrt(attention(dtype)))["PagedAttentionCombine"])["output_type"] == name


def test_a_product_says_its_type_as_the_plugin_takes_it() -> None:
    nodes = plugin_nodes(lower_tensorrt(product(to=int(ir.DataType.BFLOAT16))))
    assert values(nodes["SkinnyProduct"]) == {**MARKS, "output_type": "bf16"}
    with pytest.raises(BuildError, match="has no `to`"):
        lower_tensorrt(product())
    with pytest.raises(BuildError, match="computes in INT64; fp32, fp16, bf16 were expected"):
        lower_tensorrt(product(to=int(ir.DataType.INT64)))


@pytest.mark.parametrize("name", ["DeferredConv", "DeferredDelta"])
def test_an_operator_of_one_kernel_keeps_its_inputs_and_outputs(name: str) -> None:
    g, operator = GraphBuilder(name), OPERATORS[name]
    inputs = [g.input(each, "float32", ["batch"]) for each in operator.inputs]
    outputs = g.op_multi(name, *inputs, outputs=operator.outputs, domain=DOMAIN)
    for each, value in zip(operator.outputs, outputs, strict=True):
        g.output(each, value, "float32", ["batch"])
    model = lower_tensorrt(g.model([operator.function()], [DOMAIN]))
    node = plugin_nodes(model)[name]
    assert values(node) == MARKS
    assert [value.name for value in node.inputs if value] == list(operator.inputs)
    assert [value.name for value in node.outputs] == list(operator.outputs)
    assert not model.functions


def test_an_operator_without_a_plugin_becomes_its_body() -> None:
    g, operator = GraphBuilder("gate"), OPERATORS["DeltaGate"]
    inputs = [g.input(name, "float32", ["n"]) for name in operator.inputs]
    outputs = g.op_multi("DeltaGate", *inputs, outputs=operator.outputs, domain=DOMAIN)
    for name, value in zip(operator.outputs, outputs, strict=True):
        g.output(name, value, "float32", ["n"])
    inlined = lower_tensorrt(g.model([operator.function()], [DOMAIN]))
    assert {node.domain for node in inlined.graph} == {""}
    assert "Softplus" in {node.op_type for node in inlined.graph}
    assert not inlined.functions


def test_an_operator_with_neither_is_refused() -> None:
    g = GraphBuilder("canonical")
    g.output("y", g.op("DeltaGate", g.input("x", "float32", ["n"]), domain=DOMAIN), "float32", ["n"])
    with pytest.raises(BuildError, match="mtp::DeltaGate, for which TensorRT has no plugin, and the model no body"):
        lower_tensorrt(g.model([], [DOMAIN]))


def test_pages_of_no_known_type_are_refused() -> None:
    model = attention()
    for value in model.graph.inputs:
        value.type = None
    with pytest.raises(BuildError, match="have no type or shape"):
        lower_tensorrt(model)


def test_a_default_installation_needs_neither_tensorrt_nor_triton() -> None:
    modules = "import mtp_engines.lowering.tensorrt, mtp_plugins.tensorrt_plugins.registration"
    heavy = "{'tensorrt', 'tensorrt_bindings', 'triton', 'torch'} & set(__import__('sys').modules)"
    run = [sys.executable, "-c", f"{modules}\nprint({heavy})\nimport triton\nprint({heavy})"]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0] == "set()"
    assert "triton" in lines[1], "control: an import shows"


def test_the_registry_creates_the_plugin_of_every_node(registered: Worker) -> None:
    models = (attention(scale=0.25), product(to=int(ir.DataType.BFLOAT16)))
    nodes = {name: node for model in models for name, node in plugin_nodes(lower_tensorrt(model)).items()}
    assert len(nodes) == 4
    for name, node in nodes.items():
        attributes = {key: value for key, value in values(node).items() if key not in MARKS}
        answer = registered.call(building.ask, replace(BY_NAME[name].request(SIZES[1]), attributes=attributes))
        assert answer.kernel == BY_NAME[name].kernel
