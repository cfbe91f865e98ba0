"""Building for a backend: what is refused before any work, what is recorded, and what a second build reuses."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_engines.backends import EngineOptions
from mtp_engines.bundle import ENGINES, MANIFEST_FILE, Bundle, open_bundle, rewrite_manifest
from mtp_engines.contracts.manifest import BackendBuild, Numerics
from mtp_engines.errors import BuildError
from mtp_exporter import backends
from mtp_exporter.backends import BackendOptions, check_backend
from mtp_exporter.build import Built, Reporter, build
from mtp_exporter.options import BuildOptions
from mtp_runtime import load
from tests.fixtures.checkpoints import partial_checkpoint
from tests.support import build_refused, command_refused, leftovers, refused, run_command

TORCH_CPU: dict[str, Any] = {"backend": "torch", "device": "cpu"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small hybrid."""
    layers = ["linear_attention", "full_attention"]
    return partial_checkpoint(tmp_path_factory.mktemp("checkpoint") / "c", layer_types=layers)


def built(checkpoint: Path, out: Path, notes: list[str] | None = None, **backend: Any) -> Built:
    """A build of 64 tokens and K = 2."""
    options = BuildOptions(str(checkpoint), out, max_model_len=64, draft_tokens=2, backend=BackendOptions(**backend))
    return build(options, Reporter(note=notes.append) if notes is not None else None)


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "engines on a CPU": ({"backend": "tensorrt", "device": "cpu"}, ("--backend tensorrt", "leave --device out")),
    "RTX engines on a CPU": ({"backend": "tensorrt-rtx", "device": "cpu"}, ("--backend tensorrt-rtx", "--device")),
    "a capability for no engine": (
        {"compute_capability": "8.9"},
        ("--compute-capability is for engines", "--backend onnxruntime builds none"),
    ),
    "a capability for torch": (
        {**TORCH_CPU, "compute_capability": "8.9"},
        ("--compute-capability is for engines", "--backend torch builds none"),
    ),
    "half precision in ONNX Runtime on a CPU": (
        {"precision": "bf16"},
        ("--precision bf16 has no kernels in ONNX Runtime on a CPU", "--device cuda"),
    ),
    "our products in ONNX Runtime": (
        {"products": "skinny"},
        ("--products skinny", "torch and tensorrt", "onnxruntime"),
    ),
    "our products in ONNX Runtime on a GPU": (
        {"products": "skinny", "device": "cuda"},
        ("--products skinny", "torch and tensorrt"),
    ),
}


@pytest.mark.parametrize("combination", BAD)
def test_options_that_exclude_each_other_are_refused_before_any_work(
    checkpoint: Path, tmp_path: Path, combination: str
) -> None:
    options, parts = BAD[combination]
    build_refused(checkpoint, tmp_path / "b", *parts, backend=BackendOptions(**options))


def test_a_capability_has_to_be_named_where_there_is_no_gpu(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "local_capability", lambda: None)
    parts = ("one kind of GPU, and there is none here", "--compute-capability 8.9")
    build_refused(checkpoint, tmp_path / "b", *parts, backend=BackendOptions(backend="tensorrt-rtx"))
    parts = ("for the GPU of the machine that it runs on", "--backend tensorrt-rtx builds anywhere")
    build_refused(checkpoint, tmp_path / "b", *parts, backend=BackendOptions(backend="tensorrt"))


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "fp32"}, {"device": "cuda"}, {"device": "cuda", "precision": "fp16"}, TORCH_CPU]
    + [{"backend": "torch", "products": "skinny", "precision": precision} for precision in ("fp32", "bf16", "fp16")],
)
def test_control_options_that_fit_are_taken(options: dict[str, Any]) -> None:
    check_backend(BackendOptions(**options))


def test_torch_that_is_not_installed_is_refused_before_any_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "torch" else find(name))
    parts = ("needs the package torch", "mtp-export[torch]")
    build_refused(checkpoint, tmp_path / "b", *parts, backend=BackendOptions(**TORCH_CPU))
    with refused(*parts, error=BuildError):
        check_backend(BackendOptions(backend="torch"))
    check_backend(BackendOptions())


def test_a_build_for_torch_on_a_cpu_records_what_it_measured(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    manifest = built(checkpoint, tmp_path / "b", notes, **TORCH_CPU, precision="fp16").manifest
    assert (manifest.backend, manifest.device) == ("torch", "cpu")
    record = manifest.backends["torch-cpu"]
    assert (record.precision, record.products) == ("fp16", "library")
    assert record.numerics.rows >= 15
    assert (record.numerics.promise == "near-tie") == any("rows depend on their number" in note for note in notes)
    assert open_bundle(tmp_path / "b", thorough=True).manifest == manifest
    model = load(tmp_path / "b", threads=1)
    assert type(model.engine).__name__ == "TorchEngine"
    assert model.engine.numerics == record.numerics.promise
    ids = model.complete(prompt_ids=[5, 6, 20], max_new_tokens=8, draft_tokens=2).token_ids
    assert ids == model.complete(prompt_ids=[5, 6, 20], max_new_tokens=8, draft_tokens=0).token_ids


def test_a_promise_that_does_not_hold_is_recorded_and_said(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the record above: another measurement makes another manifest."""
    measured = Numerics("near-tie", 15, "row 7 of 15 in verifies of 2 rows")
    monkeypatch.setattr(backends, "measure_promise", lambda engine, ids: measured)
    notes: list[str] = []
    manifest = built(checkpoint, tmp_path / "b", notes, **TORCH_CPU).manifest
    assert manifest.backends["torch-cpu"] == BackendBuild("fp32", "library", measured, "cpu")
    assert any("first at row 7 of 15" in note and "near ties" in note for note in notes)
    assert load(tmp_path / "b", threads=1).engine.numerics == "near-tie"


def test_another_backend_reuses_the_graphs_and_rewrites_only_the_manifest(checkpoint: Path, tmp_path: Path) -> None:
    first = built(checkpoint, tmp_path / "b")
    assert (first.reused, first.manifest.backends) == (False, {})
    files = _files(tmp_path / "b")
    second = built(checkpoint, tmp_path / "b", **TORCH_CPU)
    assert second.reused
    after = _files(tmp_path / "b")
    assert {name for name in files if files[name] != after[name]} == {MANIFEST_FILE}
    assert files.keys() == after.keys()
    assert replace(second.manifest, backend="onnxruntime", device="cpu", backends={}) == first.manifest
    # Back again: the record stays, since the files for it do.
    third = built(checkpoint, tmp_path / "b")
    assert third.reused
    assert (third.manifest.backend, third.manifest.device) == ("onnxruntime", "cpu")
    assert set(third.manifest.backends) == {"torch-cpu"}
    assert type(load(tmp_path / "b", threads=1).engine).__name__ == "CpuEngine"


def _files(out: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time and content of every file."""
    return {
        path.relative_to(out).as_posix(): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def test_control_another_length_is_another_bundle(checkpoint: Path, tmp_path: Path) -> None:
    built(checkpoint, tmp_path / "b")
    options = BuildOptions(str(checkpoint), tmp_path / "b", max_model_len=32, draft_tokens=2)
    assert not build(options).reused


def test_engines_inside_a_bundle_are_not_foreign(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "b"
    built(checkpoint, out)
    (out / ENGINES / "sm89").mkdir(parents=True)
    (out / ENGINES / "sm89" / "backbone.engine").write_bytes(b"engine")
    assert built(checkpoint, out).reused
    assert (out / ENGINES / "sm89" / "backbone.engine").read_bytes() == b"engine"
    (out / "engines.txt").write_text("mine")
    with refused("engines.txt", "would remove", error=BuildError):
        built(checkpoint, out)


def test_without_a_gpu_a_build_for_one_says_what_was_not_tested(checkpoint: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    notes: list[str] = []
    manifest = built(checkpoint, tmp_path / "b", notes, backend="torch", products="skinny").manifest
    assert manifest.backends == {"torch-cuda": BackendBuild("bf16", "skinny")}
    assert manifest.backends["torch-cuda"].numerics.rows == 0
    assert any("needs a GPU and was not tested" in note for note in notes)
    with refused("no CUDA device here", "--device cpu"):
        load(tmp_path / "b")
    assert type(load(tmp_path / "b", options=EngineOptions(backend="onnxruntime")).engine).__name__ == "CpuEngine"


def test_a_manifest_is_rewritten_in_one_step(checkpoint: Path, tmp_path: Path) -> None:
    """The old file is replaced, never changed: whoever has it open keeps what it read."""
    built(checkpoint, tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    with (tmp_path / "b" / MANIFEST_FILE).open("rb") as before:
        changed = rewrite_manifest(bundle, replace(bundle.manifest, name="other"))
        assert b'"other"' not in before.read()
    assert isinstance(changed, Bundle)
    assert open_bundle(tmp_path / "b", thorough=True).manifest == changed.manifest
    assert changed.manifest.name == "other"
    assert [path.name for path in (tmp_path / "b").iterdir() if "partial" in path.name] == []
    assert leftovers(tmp_path / "b") == ["b"]


def test_the_command_builds_for_torch_and_refuses_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "b"
    common = ["mtp-export", "build", str(checkpoint), "--out", str(out), "--draft-tokens", "2", "--max-model-len", "64"]
    command_refused(run_command(*common, "--products", "skinny"), "--products skinny is for the backends")
    assert not out.exists()
    result = run_command(*common, "--backend", "torch", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert open_bundle(out).manifest.backend == "torch"
