"""Every name of TensorRT that the packages use, and how they call it, against the real bindings."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.plugins.workers import Worker
from tests.tensorrt import bindings
from tests.tensorrt.uses import Found, uses_of
from tests.test_structure import PACKAGES, ROOT

SOURCES = sorted(
    path
    for folder in PACKAGES.values()
    for path in folder.rglob("*.py")
    if re.search(r"\b(trt|trtp)\.\w", path.read_text(encoding="utf-8"))
)

RUNNING = """
import tensorrt as trt
logger = trt.Logger(trt.Logger.WARNING)
runtime = trt.Runtime(logger)
engine = runtime.deserialize_cuda_engine(plan)
names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
engine.get_tensor_dtype(name)
engine.get_tensor_shape(name)
engine.get_tensor_profile_shape(name, 0)
engine.get_aliased_input_tensor(name)
engine.num_optimization_profiles
context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.STATIC)
context.set_optimization_profile_async(0, stream)
context.set_input_shape(name, (1, 2))
context.set_tensor_address(name, address)
context.get_tensor_shape(name)
context.infer_shapes()
context.execute_async_v3(stream)
"""
BUILDING = """
import tensorrt as trt
logger = trt.Logger()
builder = trt.Builder(logger)
network = builder.create_network(0)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS))
parser = trt.OnnxParser(network, logger)
parser.parse_from_file(path)
errors = [parser.get_error(i) for i in range(parser.num_errors)]
for error in errors:
    error.desc(), error.node_name(), error.node_operator(), error.code()
config = builder.create_builder_config()
config.set_flag(trt.BuilderFlag.REFIT)
config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)
config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
cache = config.create_timing_cache(b"")
config.set_timing_cache(cache, ignore_mismatch=False)
config.get_timing_cache().serialize()
profile = builder.create_optimization_profile()
profile.set_shape(name, (1,), (1,), (1,))
config.add_optimization_profile(profile)
plan = builder.build_serialized_network(network, config)
registry = trt.get_plugin_registry()
registry.get_creator("DeferredDelta", "1", "mtp")
trt.QuickPluginCreationRequest.STRICT_AOT
"""


ONLY_RTX = {"CausalMaskKind", "IAttention.causal_kind", "IAttention.key_value_lengths"}
"""Used on graphs without plugins, which TensorRT is not given; its version 10.16 has none of these."""


def uses(worker: Worker, source: str, module: str = "tensorrt") -> Found:
    """What a file uses."""
    found = worker.call(uses_of, source, module)
    assert isinstance(found, Found)
    return found


def test_the_bindings_are_real_and_build_nothing(tensorrt: Worker) -> None:
    assert "factory function returned nullptr" in tensorrt.call(bindings.builder_error)
    assert tensorrt.call(bindings.creators), "the lean runtime has plugins of its own"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_that_a_file_uses_exists_and_is_called_right(tensorrt: Worker, path: Path) -> None:
    found = uses(tensorrt, path.read_text(encoding="utf-8"))
    assert [problem for problem in found.problems if not only_rtx(problem)] == []
    assert found.uses


def only_rtx(problem: str) -> bool:
    """Whether a problem is about a name that TensorRT-RTX alone has."""
    return any(problem.endswith((f"no {name}", f"no tensorrt_bindings.{name}")) for name in ONLY_RTX)


def test_the_builder_uses_what_tensorrt_rtx_has(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("tensorrt_rtx not installed: python -m pip install -e '.[dev]'")
    source = (PACKAGES["mtp_engines"] / "builders" / "tensorrt" / "attention.py").read_text(encoding="utf-8")
    worker = Worker(interpret=False, cache=str(tmp_path))
    found = uses(worker, source, "tensorrt_rtx")
    worker.close()
    assert found.problems == ()
    assert {use.removeprefix("tensorrt_rtx.") for use in found.uses} >= ONLY_RTX


@pytest.mark.parametrize("source", [RUNNING, BUILDING], ids=["running", "building"])
def test_what_engines_are_built_and_run_with_exists(tensorrt: Worker, source: str) -> None:
    found = uses(tensorrt, source)
    assert found.problems == ()
    # One use for each attribute in the text: none was passed over because its owner was not known.
    text = re.sub(r"^import.*$", "", source, flags=re.MULTILINE)
    assert {use.split(".")[1] for use in found.uses} == set(re.findall(r"(?<=\.)[A-Za-z]\w*", text))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("trt.Bilder", "there is no tensorrt_bindings.Bilder"),
        ("trt.PreviewFeature.ALIASED_PLUGIN_IO", "there is no PreviewFeature.ALIASED_PLUGIN_IO"),
        ("network.add_paged_attention", "there is no INetworkDefinition.add_paged_attention"),
        ("config.builder_optimization = 5", "there is no IBuilderConfig.builder_optimization"),
        ("config.get_timing_cache().save()", "there is no ITimingCache.save"),
        ("errors = [parser.get_error(i) for i in range(2)]\nfor e in errors:\n    e.text()", "no ParserError.text"),
        ("parser.parse_from_file(path, 1)", r"parse_from_file takes \(model\), not"),
        ("config.set_timing_cache(cache)", r"set_timing_cache takes \(cache, ignore_mismatch\)"),
        ("builder.create_network(flag=0)", r"create_network takes \(flags=None\)"),
        ("profile.set_shape(name, least)", "set_shape takes"),
        ("import tensorrt.plugin as trtp\ntrtp.registr", "there is no plugin.registr"),
        ("import tensorrt.plugin as trtp\ntrtp.KernelLaunchParams(grid=1)", "KernelLaunchParams takes"),
        ("import tensorrt.plugin as trtp\ntrtp.cdiv(1)", r"cdiv takes \(first: "),
    ],
)
def test_control_what_does_not_exist_is_found(tensorrt: Worker, line: str, problem: str) -> None:
    found = uses(tensorrt, f"{BUILDING}\n{line}")
    assert len(found.problems) == 1
    assert re.search(problem, found.problems[0])
