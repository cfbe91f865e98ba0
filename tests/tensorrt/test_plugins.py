"""Every plugin in TensorRT's own registry, asked what a builder asks, against its kernel and its launch."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_plugins.registry import OPERATORS
from mtp_plugins.tensorrt_plugins.declaration import Alias, Plugin, PluginError
from mtp_plugins.tensorrt_plugins.registry import PLUGINS
from mtp_plugins.tensorrt_plugins.sizes import axis, number
from mtp_plugins.triton_kernels.launch import Launch
from tests.plugins.workers import Worker
from tests.tensorrt import bindings, building
from tests.tensorrt.building import CAPABILITY, Answer
from tests.tensorrt.cases import BY_NAME, CASES, OPEN, SIZES, Case


def ask(worker: Worker, case: Case, sizes: Mapping[str, int]) -> Answer:
    """The answers of a plugin."""
    answer = worker.call(building.ask, case.request(sizes))
    assert isinstance(answer, Answer)
    return answer


def parameters(module: str, name: str) -> list[str]:
    """Names of a kernel's parameters; in a worker."""
    return list(getattr(importlib.import_module(module), name).arg_names)


def compiled(kernel: str, signature: Mapping[str, str], launch: Launch) -> str:
    """The PTX of a kernel, compiled for this launch; in a worker."""
    from mtp_plugins.triton_kernels.ptx import compile_ptx

    module, name = kernel.split(":")
    function, constants = getattr(importlib.import_module(module), name), launch.constexprs
    return compile_ptx(function, signature, constants, CAPABILITY, launch.num_warps, num_stages=launch.num_stages).text


def test_every_plugin_has_a_case() -> None:
    assert sorted(PLUGINS) == sorted(BY_NAME)
    with_kernel = {path.parent.name for path in Path(building.__file__).parents[2].glob("plugins/*/*/kernel.py")}
    assert with_kernel == {plugin.kernel.split(".")[1] for plugin in PLUGINS.values()}


def test_the_plugins_are_in_the_registry(registered: Worker) -> None:
    assert {f"mtp::{name}" for name in PLUGINS} <= set(registered.call(bindings.creators))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.plugin)
@pytest.mark.parametrize("sizes", SIZES, ids=["one row", "more"])
def test_a_plugin_launches_what_its_kernel_is_launched_with(
    registered: Worker, case: Case, sizes: Mapping[str, int]
) -> None:
    plugin, sizes = PLUGINS[case.plugin], {**sizes, **case.fixed}
    answer, launch = ask(registered, case, sizes), case.launch(sizes)
    assert answer.grid == launch.grid
    assert dict(zip(plugin.scalars, answer.scalars, strict=True)) == launch.scalars
    assert answer.block == (32 * launch.num_warps, 1, 1)
    assert answer.kernel == case.kernel
    assert re.search(rf"\.visible \.entry {case.kernel}\(", answer.ptx)
    assert f".target sm_{CAPABILITY}\n" in answer.ptx
    signature = plugin.signature(case.element, case.attributes)
    assert answer.ptx == registered.call(compiled, plugin.kernel, signature, launch)
    kinds = ["u64"] * len(plugin.inputs) + ["u32"] * len(plugin.scalars) + ["u64"] * len(plugin.outputs)
    assert re.findall(r"\.param \.(\w+) .*?_param_\d+[,\n]", answer.ptx) == kinds
    module, name = plugin.kernel.split(":")
    expected = [plugin.pointer(name) for name in plugin.inputs]
    expected += [*launch.scalars, *(plugin.pointer(name) for name in plugin.outputs), *launch.constexprs]
    assert registered.call(parameters, module, name) == expected
    assert 0 <= answer.shared <= 48 << 10, "more has to be asked for at launch"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.plugin)
@pytest.mark.parametrize("sizes", SIZES, ids=["one row", "more"])
def test_outputs_have_the_right_types_shapes_and_memory(
    registered: Worker, case: Case, sizes: Mapping[str, int]
) -> None:
    plugin, answer = PLUGINS[case.plugin], ask(registered, case, sizes)
    inputs = list(plugin.inputs)
    aliased = {name: inputs[at] for name, at in zip(plugin.outputs, answer.aliased, strict=True) if at >= 0}
    assert aliased == case.aliased
    request = case.request(sizes)
    in_place = {output: request.sizes[inputs.index(name)] for output, name in case.aliased.items()}
    shapes = dict(zip(plugin.outputs, answer.output_shapes, strict=True))
    assert shapes == {**case.shapes({**sizes, **case.fixed}), **in_place}
    assert answer.output_types == [case.types.get(name, "BF16") for name in plugin.outputs]
    types = [*request.types, *answer.output_types]
    assert answer.formats == [(name, "LINEAR") for name in types], "one combination: the network's own types"
    assert answer.tactics == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.plugin)
def test_one_kernel_serves_every_number_of_rows(registered: Worker, case: Case) -> None:
    one, more = (ask(registered, case, sizes) for sizes in SIZES)
    assert one.ptx == more.ptx
    assert not all(one.fixed), "control: the grid follows an axis that the graph leaves open"


@pytest.mark.parametrize("element", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", [name for name, plugin in PLUGINS.items() if plugin.element])
def test_the_element_type_chooses_the_kernel(registered: Worker, name: str, element: str) -> None:
    case = replace(BY_NAME[name], element=element)
    answer = ask(registered, case, SIZES[1])
    want = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16"}[element]
    outputs = dict(zip(PLUGINS[name].outputs, answer.output_types, strict=True))
    assert {outputs[output] for output in outputs if output not in case.types} <= {want}
    # One that only copies does not care which type of 16 bits it is.
    same = ("bf16", "fp16") if name == "PagedKvAppend" else ("bf16",)
    assert (answer.ptx == ask(registered, BY_NAME[name], SIZES[1]).ptx) == (element in same)


@pytest.mark.parametrize(
    ("name", "attributes", "outputs"),
    [
        ("PagedAttentionPartial", {"scale": 0.5}, ["FLOAT", "FLOAT", "FLOAT"]),
        ("PagedAttentionCombine", {"output_type": "fp16"}, ["HALF"]),
        ("SkinnyProduct", {"output_type": "bf16"}, ["BF16"]),
    ],
)
def test_an_attribute_reaches_the_kernel(
    registered: Worker, name: str, attributes: dict[str, float | str], outputs: list[str]
) -> None:
    case = BY_NAME[name]
    other = ask(registered, replace(case, attributes=attributes), SIZES[0])
    assert other.output_types == outputs
    assert other.ptx != ask(registered, case, SIZES[0]).ptx


def test_a_plugin_of_one_operator_has_its_inputs_and_outputs() -> None:
    single = {name: plugin for name, plugin in PLUGINS.items() if name in OPERATORS}
    assert sorted(set(PLUGINS) - set(single)) == ["PagedAttentionCombine", "PagedAttentionPartial"]
    for name, plugin in single.items():
        assert (tuple(plugin.inputs), tuple(plugin.outputs)) == (OPERATORS[name].inputs, OPERATORS[name].outputs)
    partial, combine = PLUGINS["PagedAttentionPartial"], PLUGINS["PagedAttentionCombine"]
    assert tuple(partial.inputs) == OPERATORS["PagedAttention"].inputs
    assert [*partial.outputs, "lengths"] == list(combine.inputs)
    assert tuple(combine.outputs) == OPERATORS["PagedAttention"].outputs


def _other_order(names: Mapping[str, object], a: str, b: str) -> dict[str, object]:
    order = list(names)
    i, j = order.index(a), order.index(b)
    order[i], order[j] = b, a
    return {name: names[name] for name in order}


def _without_a_constant(fixed: object) -> object:
    launch = PLUGINS["DeferredConv"].launch(fixed)  # type: ignore[arg-type]
    return replace(launch, constexprs={k: v for k, v in launch.constexprs.items() if k != "tap_block"})


FAULTS: dict[str, tuple[str, Callable[[Plugin], dict[str, object]], str]] = {
    "two inputs": (
        "DeferredConv",
        lambda p: {"inputs": _other_order(p.inputs, "x", "staged_x")},
        "passes staged_x_ptr",
    ),
    "two outputs": ("DeferredConv", lambda p: {"outputs": _other_order(p.outputs, "output", "next_x")}, "passes x_ptr"),
    "two scalars": (
        "PagedKvAppend",
        lambda p: {"scalars": _other_order(p.scalars, "rows", "max_pages")},
        "its kernel takes key_ptr",
    ),
    "a constant less": ("DeferredConv", lambda p: {"launch": _without_a_constant}, "its kernel takes"),
}


def ask_faulty(fault: str, capability: int) -> None:
    """Register a plugin with a fault in its declaration and ask it; in a worker."""
    from mtp_plugins.tensorrt_plugins.registration import register

    name, change, _ = FAULTS[fault]
    faulty = replace(PLUGINS[name], name=f"{name}_{fault.replace(' ', '_')}", **change(PLUGINS[name]))  # type: ignore[arg-type]
    register([faulty], capability)
    request = replace(BY_NAME[name].request(SIZES[1]), plugin=faulty.name)
    order = [list(PLUGINS[name].inputs).index(each) for each in faulty.inputs]
    types, shapes, sizes = ([group[i] for i in order] for group in (request.types, request.shapes, request.sizes))
    building.ask(replace(request, types=types, shapes=shapes, sizes=sizes))


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_declaration_that_does_not_fit_its_kernel_is_refused(registered: Worker, fault: str) -> None:
    with pytest.raises(PluginError, match=FAULTS[fault][2]):
        registered.call(ask_faulty, fault, CAPABILITY)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("DeferredConv", {"present_state": Alias("staged_x")}, "present_state in the memory of staged_x; past_state"),
        ("DeferredConv", {"present_state": (axis("batch"),)}, "present_state in the memory of None; past_state"),
        ("DeferredConv", {"next_x": Alias("staged_x")}, "next_x in the memory of staged_x; None was expected"),
        ("PagedKvAppend", {"present_key_pages": Alias("past_value_pages")}, "past_key_pages was expected"),
        ("DeferredConv", {"next_x": (axis("batch"), axis("row"))}, r"uses the axes \['row'\]"),
    ],
)
def test_control_a_wrong_output_is_refused(name: str, change: dict[str, object], message: str) -> None:
    plugin = PLUGINS[name]
    with pytest.raises(PluginError, match=message):
        replace(plugin, outputs={**plugin.outputs, **change})


def test_control_a_declaration_that_names_what_it_has_not_is_refused() -> None:
    plugin = PLUGINS["DeferredConv"]
    fewer = {name: axes for name, axes in plugin.inputs.items() if name != "kept_rows"}
    with pytest.raises(PluginError, match=r"has types for \['kept_rows_ptr'\]"):
        replace(plugin, inputs=fewer)
    with pytest.raises(PluginError, match="has no type for other"):
        replace(plugin, inputs={**plugin.inputs, "other": ("batch",)}).check_kernel([], {})
    with pytest.raises(PluginError, match="one at most was expected"):
        replace(plugin, attributes={"a": float, "b": str})


def ask_with_another_grid(capability: int) -> Answer:
    """DeferredConv with two axes of its grid in each other's place; in a worker."""
    from mtp_plugins.tensorrt_plugins.registration import register

    plugin, name = PLUGINS["DeferredConv"], "DeferredConvTurned"
    register([replace(plugin, name=name, grid=(plugin.grid[1], plugin.grid[0], number(1)))], capability)
    return building.ask(replace(BY_NAME["DeferredConv"].request(SIZES[1]), plugin=name))


def test_control_another_grid_is_seen(registered: Worker) -> None:
    answer, case = registered.call(ask_with_another_grid, CAPABILITY), BY_NAME["DeferredConv"]
    assert answer.grid != case.launch({**SIZES[1], **case.fixed}).grid


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"types": {"weight": "HALF"}}, "got weight of type DataType.HALF; bf16 was expected"),
        ({"types": {"past_state": "HALF"}}, "past_state of type DataType.HALF; fp32 was expected"),
        ({"types": {"x": "INT32"}}, "got x of type DataType.INT32; fp32, fp16, bf16 were expected"),
        ({"shapes": {"x": (-1, -1, -1), "weight": (-1, 1, 4), "past_state": (-1, 3, -1), "staged_x": (-1, 6, -1)}},
         "compiles its kernel for a fixed channels, which the network leaves open"),
        ({"shapes": {"weight": (100, 1, 4)}}, "got 100 as channels of weight, and 200 from an input before it"),
        ({"shapes": {"weight": (200, 4)}, "sizes": {"weight": (200, 4)}}, "got weight of 2 axes; 3 were expected"),
    ],
)  # fmt: skip
def test_a_network_that_does_not_fit_is_refused(
    registered: Worker, change: dict[str, dict[str, object]], message: str
) -> None:
    request, names = BY_NAME["DeferredConv"].request(SIZES[1]), list(PLUGINS["DeferredConv"].inputs)
    for part, values in change.items():
        changed = [values.get(name, old) for name, old in zip(names, getattr(request, part), strict=True)]
        request = replace(request, **{part: changed})  # type: ignore[arg-type]
        if part == "shapes" and "sizes" not in change:
            sizes = [tuple(s if d < 0 else d for d, s in zip(*pair, strict=True))
                     for pair in zip(request.shapes, request.sizes, strict=True)]  # fmt: skip
            request = replace(request, sizes=sizes)
    with pytest.raises(PluginError, match=message):
        registered.call(building.ask, request)


def test_a_node_without_an_attribute_is_refused(registered: Worker) -> None:
    request = replace(BY_NAME["PagedAttentionPartial"].request(SIZES[0]), attributes={})
    with pytest.raises(PluginError, match=r"got the attributes \[\]; \['scale'\] were expected"):
        registered.call(building.ask, request)


def test_nothing_is_compiled_in_the_process_that_runs_an_engine(registered: Worker) -> None:
    request = BY_NAME["Accept"].request(SIZES[0])
    assert registered.call(building.kind_of, request, "STRICT_AOT") == "_TemplateAOTPlugin"
    with pytest.raises(ValueError, match="JIT implementation requested, but not defined"):
        registered.call(building.kind_of, request, "STRICT_JIT")


def test_open_axes_are_those_of_a_graph() -> None:
    assert {name for sizes in SIZES for name in sizes} == OPEN
