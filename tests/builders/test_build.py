"""What happens around the library: graphs written once, engines kept and built again, wrong ones refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest

from mtp_engines.backends.gpu.pages import PAGE_SIZE
from mtp_engines.backends.gpu.widths import engine_widths
from mtp_engines.builders.tensorrt import build as build_module
from mtp_engines.builders.tensorrt.build import build_engines, find_engines
from mtp_engines.builders.tensorrt.graphs import plugin_form, standard_form, write_graphs
from mtp_engines.builders.tensorrt.io import interface_of, profiles_of
from mtp_engines.builders.tensorrt.job import Job, Report
from mtp_engines.builders.tensorrt.target import FLAVOURS, Target
from mtp_engines.bundle import Bundle, open_bundle
from mtp_engines.contracts import names
from mtp_engines.contracts.engines import EngineFile, TensorSpec
from mtp_engines.errors import BuildError
from tests.fixtures.dense_families import eagle_checkpoint, plain_checkpoint
from tests.support import build_bundle, refused

Build = Callable[..., tuple[EngineFile, ...]]


class Library:
    """Instead of TensorRT-RTX: takes every graph as it is, notes its name and writes a plan of four bytes."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.fails_at: str | None = None

    def run(self, job: Job, title: str, graph: str) -> Report:
        self.built.append(graph)
        if graph == self.fails_at:
            raise BuildError(f"{title} refused {graph}.")
        Path(job.plan).write_bytes(b"plan")
        model = ir.load(job.graph)
        inputs, outputs = (tuple(map(_spec, values)) for values in (model.graph.inputs, model.graph.outputs))
        return Report("1.7.1", inputs=inputs, outputs=outputs, layers=len(model.graph), plan_bytes=4)


def _spec(value: ir.Value) -> TensorSpec:
    assert value.dtype is not None
    shape = tuple(axis if isinstance(axis, int) else -1 for axis in value.shape or ())
    return TensorSpec(str(value.name), value.dtype.numpy().name, shape)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in, in the place of process and package."""
    found = Library()
    monkeypatch.setattr(build_module, "run_job", found.run)
    target = Target(FLAVOURS["tensorrt-rtx"], "1.7.1", (8, 9))
    monkeypatch.setattr(build_module, "resolve_target", lambda flavour, capability: target)
    return found


def build(bundle: Bundle, place: Path, rows: tuple[int, ...] = (1,)) -> tuple[EngineFile, ...]:
    """Engines in bfloat16."""
    return build_engines(bundle, "tensorrt-rtx", "8.9", "bf16", rows, place)


def test_engines_are_built_once_and_again_when_damaged(carried: Bundle, library: Library, tmp_path: Path) -> None:
    place = tmp_path / "engines"
    first = build(carried, place)
    assert library.built == ["backbone", "head", "mtp"]
    assert build(carried, place, (1, 1)) == first
    assert len(library.built) == 3
    (place / "mtp.plan").write_bytes(b"pla")
    assert build(carried, place) == first
    assert len(library.built) == 6
    assert (place / "mtp.plan").read_bytes() == b"plan"
    assert build(carried, place, (1, 2)) != first, "control: other rows are other engines"
    assert len(library.built) == 9


def test_built_engines_are_found_and_nothing_is_built_for_it(carried: Bundle, library: Library, tmp_path: Path) -> None:
    place = tmp_path / "engines"
    assert find_engines(carried, "tensorrt-rtx", "8.9", "bf16", (1,), place) is None
    engines = build(carried, place)
    assert find_engines(carried, "tensorrt-rtx", "8.9", "bf16", (1,), place) == (place, engines)
    assert find_engines(carried, "tensorrt-rtx", "8.9", "bf16", (1, 2), place) is None, "control: other rows"
    assert len(library.built) == 3


def test_a_build_that_fails_half_way_leaves_nothing(carried: Bundle, library: Library, tmp_path: Path) -> None:
    library.fails_at = "mtp"
    with refused("refused mtp", error=BuildError):
        build(carried, tmp_path / "engines")
    assert library.built[-1] == "mtp", "control: it had begun"
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_lacks_an_output_is_refused_and_not_kept(
    carried: Bundle, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_a_state(*arguments: object) -> dict[str, Path]:
        paths = write_graphs(*arguments)  # type: ignore[arg-type]
        model = ir.load(paths["backbone"])
        lost = next(value for value in model.graph.outputs if value.name == names.present_conv(1))
        model.graph.outputs.remove(lost)
        ir.save(model, paths["backbone"])
        return paths

    monkeypatch.setattr(build_module, "write_graphs", without_a_state)
    with refused("graph backbone", "output present.1.conv: nothing", "float32[-1, 3, 552]", error=BuildError):
        build(carried, tmp_path / "engines")
    assert list(tmp_path.iterdir()) == []


def test_every_job_says_where_for_whom_and_in_which_shapes(
    carried: Bundle, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []

    def note(job: Job, title: str, graph: str) -> Report:
        jobs.append(job)
        return library.run(job, title, graph)

    monkeypatch.setattr(build_module, "run_job", note)
    build(carried, tmp_path / "engines", (1, 4))
    assert [len(job.profiles) for job in jobs] == [2, 2, 2]
    assert {(job.module, job.capability, job.elsewhere) for job in jobs} == {("tensorrt_rtx", (8, 9), True)}
    for job in jobs:
        assert Path(job.graph).is_absolute()
        assert Path(job.plan).is_absolute()


def test_weights_are_written_once_for_all_graphs(carried: Bundle, tmp_path: Path) -> None:
    paths = write_graphs(carried, "bf16", tmp_path, standard_form(carried.manifest.limits))
    used: dict[str, tuple[object, ...]] = {}
    cast = {}
    for path in paths.values():
        for name, value in ir.load(path).graph.initializers.items():
            tensor = value.const_value
            assert isinstance(tensor, ir.ExternalTensor)
            place = (tensor.location, tensor.offset, tensor.length)
            assert used.setdefault(name, place) == place, f"{name} is stored twice"
            if tensor.location == "weights.cast.data":
                cast[name] = tensor.length or 0
    assert {"weights.cast.data", "weights.data"} == {str(place[0]) for place in used.values()}
    size = (tmp_path / "weights.cast.data").stat().st_size
    assert sum(cast.values()) <= size < sum(cast.values()) + 4096 * len(cast)
    users = [name for name, path in paths.items() if "embedding" in ir.load(path).graph.initializers]
    assert users == ["backbone", "head", "mtp"], "control: the tied matrix has three readers"


def test_a_head_with_two_inputs_of_rows_has_a_profile_for_its_own(library: Library, tmp_path: Path) -> None:
    target = plain_checkpoint(tmp_path / "target", seed=1)
    draft = eagle_checkpoint(tmp_path / "draft", target=target, seed=2, version=3, draft_vocab=44)
    bundle = open_bundle(build_bundle(target, tmp_path / "bundle", draft_model=str(draft)))
    spec, limits = bundle.manifest.model, bundle.manifest.limits
    profiles = profiles_of("mtp", interface_of("mtp", spec, limits, "bf16"), (1, 4), replace(limits, max_batch_size=1))
    taps = [(shapes[names.TAP][2][1], shapes[names.CHAIN][2][1]) for shapes in profiles]
    assert taps == [(1, 0), (4, 0), (0, 1)]
    engines = {engine.graph: engine for engine in build(bundle, tmp_path / "engines")}
    assert list(engines) == ["backbone", "head", "mtp", "mtp_head"]
    assert names.TAP in {spec.name for spec in engines["backbone"].outputs}
    assert {names.TAP, names.CHAIN} <= {spec.name for spec in engines["mtp"].inputs}


@pytest.fixture
def with_plugins(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in as full TensorRT on a machine with the GPU."""
    target = Target(FLAVOURS["tensorrt"], "11.4.0", (9, 0))
    monkeypatch.setattr(build_module, "resolve_target", lambda flavour, capability: target)
    return library


@pytest.mark.parametrize("skinny", [False, True])
def test_engines_with_plugins_have_pages_and_staged_rows(
    carried: Bundle, with_plugins: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skinny: bool
) -> None:
    jobs: list[Job] = []

    def note(job: Job, title: str, graph: str) -> Report:
        jobs.append(job)
        return with_plugins.run(job, title, graph)

    monkeypatch.setattr(build_module, "run_job", note)
    widths = engine_widths(carried.manifest.limits)
    engines = build_engines(carried, "tensorrt", "9.0", "bf16", widths, tmp_path / "engines", skinny=skinny)
    backbone = next(engine for engine in engines if engine.graph == "backbone")
    inputs = {spec.name: spec for spec in backbone.inputs}
    widest = carried.manifest.limits.max_draft_tokens + 1
    assert inputs[names.past_key(3)] == TensorSpec(names.past_key(3), "bfloat16", (-1, PAGE_SIZE, 2, 64))
    assert inputs[names.staged(0, "conv")].shape == (-1, widest, 552)
    assert {spec.name for spec in backbone.outputs} >= {names.following(0, "key"), names.present_recurrent(2)}
    assert {(job.module, job.aliased_io, job.elsewhere) for job in jobs} == {("tensorrt", True, False)}
    assert all(job.plugins == "mtp_plugins.tensorrt_plugins.registration:register_all" for job in jobs)
    assert len({job.timing_cache for job in jobs}) == 1
    assert jobs[0].profiles[0][names.INPUT_IDS] == ((1, 1), (2, 1), (2, 1))


def test_the_form_of_the_products_makes_other_engines(carried: Bundle, with_plugins: Library, tmp_path: Path) -> None:
    place, widths = tmp_path / "engines", (1, 4)
    first = build_engines(carried, "tensorrt", "9.0", "bf16", widths, place)
    assert build_engines(carried, "tensorrt", "9.0", "bf16", widths, place) == first
    assert len(with_plugins.built) == 3, "control: the same are found"
    build_engines(carried, "tensorrt", "9.0", "bf16", widths, place, skinny=True)
    assert len(with_plugins.built) == 6


def test_graphs_with_plugins_hold_nothing_but_plugins_and_standard_operators(carried: Bundle, tmp_path: Path) -> None:
    form = plugin_form(carried.manifest.limits, skinny=True)
    paths = write_graphs(carried, "bf16", tmp_path, form)
    found = {
        name: {node.op_type for node in ir.load(path).graph if node.domain == "mtp"} for name, path in paths.items()
    }
    paged = {"PagedKvAppend", "PagedAttentionPartial", "PagedAttentionCombine", "SkinnyProduct"}
    assert found["head"] == {"SkinnyProduct"}
    assert found["mtp"] == paged
    assert found["backbone"] == paged | {"DeferredConv", "DeferredDelta"}
    for path in paths.values():
        assert ir.load(path).functions == {}


@pytest.mark.parametrize("lost", [names.past_conv(0), names.staged(1, "beta"), names.BLOCK_TABLE])
def test_control_an_input_that_is_lost_is_noticed(carried: Bundle, lost: str) -> None:
    spec, limits = carried.manifest.model, carried.manifest.limits
    interface = interface_of("backbone", spec, limits, "bf16", paged=True)
    found = [
        TensorSpec(t.name, t.dtype, tuple(a if isinstance(a, int) else -1 for a in t.axes)) for t in interface.inputs
    ]
    outputs = [
        TensorSpec(t.name, t.dtype, tuple(a if isinstance(a, int) else -1 for a in t.axes)) for t in interface.outputs
    ]
    interface.check("backbone", found, outputs)
    with refused(f"input {lost}: nothing", error=BuildError):
        interface.check("backbone", [tensor for tensor in found if tensor.name != lost], outputs)
