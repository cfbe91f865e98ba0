"""Real engines of TensorRT-RTX, which needs no GPU to build them. Nothing here can run one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from mtp_engines.builders.tensorrt.build import build_engines
from mtp_engines.builders.tensorrt.job import Job
from mtp_engines.builders.tensorrt.process import run_job
from mtp_engines.bundle import Bundle, open_bundle
from mtp_engines.contracts import names
from mtp_engines.contracts.engines import EngineFile
from mtp_engines.errors import BuildError
from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_tools.made_up.shapes import PUBLISHED
from mtp_tools.made_up.write import write_checkpoint
from tests.builders.conftest import CARRIED, needs_rtx
from tests.fixtures.dense_families import eagle_checkpoint, mimo_checkpoint, plain_checkpoint
from tests.fixtures.moe_families import MAKERS
from tests.support import build_bundle, refused

ROWS = (1, 4)
pytestmark = needs_rtx


def by_graph(engines: tuple[EngineFile, ...]) -> dict[str, EngineFile]:
    """Engines by the name of their graph."""
    return {engine.graph: engine for engine in engines}


@pytest.mark.parametrize("capability", ["8.9", "12.0"])
def test_the_carried_checkpoint_is_built_in_bfloat16(carried: Bundle, tmp_path: Path, capability: str) -> None:
    lines: list[str] = []
    engines = build_engines(carried, "tensorrt-rtx", capability, "bf16", ROWS, tmp_path / "engines", lines.append)
    assert [engine.graph for engine in engines] == ["backbone", "head", "mtp"]
    assert {engine.target for engine in engines} == {f"sm_{capability.replace('.', '')}"}
    for engine in engines:
        plan = (tmp_path / "engines" / engine.file).read_bytes()
        named = {name for name in (b"sm89", b"sm120") if name in plan}
        assert named == {engine.target.replace("_", "").encode()}, "the plan names the device it is for, and no other"
        assert len(plan) > 100_000
        assert (engine.backend, engine.rows, engine.precision) == ("tensorrt-rtx", ROWS, "bf16")
    backbone = by_graph(engines)["backbone"]
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in (*backbone.inputs, *backbone.outputs)}
    capacity = carried.manifest.limits.capacity
    assert shapes[names.past_key(3)] == shapes[names.present_key(3)] == ("bfloat16", (-1, 2, capacity, 64))
    assert shapes[names.past_recurrent(0)] == ("float32", (-1, 9, 32, 40))
    assert shapes[names.factor(0, "key")] == ("float32", (-1, -1, 96))
    assert shapes[names.HIDDEN] == ("float32", (-1, -1, 256))
    assert sum(path.stat().st_size > 0 for path in (tmp_path / "engines").iterdir()) == 4
    assert [line.split(":")[0] for line in lines] == ["backbone", "head", "mtp", "engines"]


def test_float32_is_built_too(carried: Bundle, tmp_path: Path) -> None:
    engines = build_engines(carried, "tensorrt-rtx", "8.9", "fp32", (1,), tmp_path / "engines")
    assert {spec.dtype for spec in by_graph(engines)["mtp"].inputs} == {"float32", "int64"}


def test_a_node_that_only_a_plugin_has_ends_as_one_sentence(tmp_path: Path) -> None:
    g = GraphBuilder("backbone")
    x = g.input("x", "float32", ["rows", 4])
    g.output("y", g.op("PagedAttention", x, domain=DOMAIN), "float32", ["rows", 4])
    ir.save(g.model(domains=[DOMAIN]), tmp_path / "g.onnx")
    shape = ((1, 4),) * 3
    job = Job(
        module="tensorrt_rtx",
        graph=str(tmp_path / "g.onnx"),
        plan=str(tmp_path / "g.plan"),
        result=str(tmp_path / "report.json"),
        capability=(8, 9),
        elsewhere=True,
        profiles=({"x": shape},),
    )
    with refused("TensorRT-RTX", "backbone", "PagedAttention", error=BuildError):
        run_job(job, "TensorRT-RTX", "backbone")
    assert not (tmp_path / "g.plan").exists()


def _eagle3(place: Path) -> Path:
    """A bundle whose draft has three taps and a vocabulary of its own."""
    target = plain_checkpoint(place / "target", seed=1)
    draft = eagle_checkpoint(place / "draft", target=target, seed=2, version=3, draft_vocab=44)
    return build_bundle(target, place / "bundle", draft_model=str(draft))


def _bundle_of(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    return lambda place: build_bundle(make(place / "checkpoint"), place / "bundle")


FAMILIES: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "latent attention and experts": (_bundle_of(lambda place: MAKERS["deepseek_v3"](place, seed=6)), ["mtp"]),
    "hybrid with experts": (_bundle_of(lambda place: MAKERS["qwen3_next"](place, seed=12)), ["mtp"]),
    "two trained depths": (_bundle_of(lambda place: mimo_checkpoint(place, seed=1, depths=2)), ["mtp", "mtp.1"]),
    "eagle3, two inputs of rows": (_eagle3, ["mtp", "mtp_head"]),
    "own head": (
        _bundle_of(lambda place: MAKERS["glm4_moe"](place, seed=6, own_head="different")),
        ["mtp", "mtp_head"],
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_built(tmp_path: Path, family: str) -> None:
    make, heads = FAMILIES[family]
    engines = build_engines(open_bundle(make(tmp_path)), "tensorrt-rtx", "8.9", "bf16", (1,), tmp_path / "engines")
    assert [engine.graph for engine in engines] == ["backbone", "head", *heads]


@pytest.mark.slow
def test_a_made_up_model_of_a_published_size_is_built(tmp_path: Path) -> None:
    """Gigabytes and minutes: the published shape of 0.8B parameters with a prefill profile."""
    write_checkpoint(tmp_path / "checkpoint", PUBLISHED["0.8B"])
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(CARRIED / name, tmp_path / "checkpoint" / name)
    bundle = open_bundle(build_bundle(tmp_path / "checkpoint", tmp_path / "bundle", max_model_len=4096))
    for capability in ("8.9", "12.0"):
        engines = build_engines(bundle, "tensorrt-rtx", capability, "bf16", (1, 4, 256))
        assert [engine.graph for engine in engines] == ["backbone", "head", "mtp"]
