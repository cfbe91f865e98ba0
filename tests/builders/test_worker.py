"""The worker against a stand-in for TensorRT: what it asks for, in which order, and what it reports."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_engines.builders.tensorrt import worker
from mtp_engines.builders.tensorrt.job import JOB, REPORT, Job, Report
from mtp_engines.builders.tensorrt.process import run_job
from mtp_engines.contracts.engines import TensorSpec
from mtp_engines.errors import BuildError
from tests.builders import fake_tensorrt
from tests.support import refused

FAKE = "tests.builders.fake_tensorrt"


@pytest.fixture(autouse=True)
def _stand_in(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in under the name that Polygraphy imports, here and in worker processes."""
    place = tmp_path_factory.mktemp("path")
    (place / "tensorrt.py").write_text(f"import sys\nimport {FAKE} as stand_in\nsys.modules[__name__] = stand_in\n")
    monkeypatch.setenv("PYTHONPATH", str(place), prepend=os.pathsep)
    monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt)
    monkeypatch.setenv("POLYGRAPHY_USE_TENSORRT_RTX", "0")
    fake_tensorrt.CALLS.clear()


def job_of(folder: Path, graph: str = "backbone", **options: Any) -> Job:
    """A job for the stand-in, over a graph that only has a name."""
    (folder / f"{graph}.onnx").write_bytes(b"")
    profile = {"x": ((1, 4), (3, 4), (3, 4))}
    job = Job(
        module=FAKE,
        graph=str(folder / f"{graph}.onnx"),
        plan=str(folder / f"{graph}.plan"),
        result=str(folder / "report.json"),
        capability=(9, 0),
        elsewhere=False,
        profiles=(profile,),
    )
    return replace(job, **options)


def work(job: Job) -> Report:
    """The report of a job that is done in this process."""
    path = Path(job.result).with_name("job.json")
    path.write_bytes(JOB.dump_json(job))
    worker.main(path)
    report: Report = REPORT.validate_json(Path(job.result).read_bytes())
    return report


def calls(what: str) -> list[tuple[Any, ...]]:
    """What the stand-in was asked, of one kind."""
    return [call for call in fake_tensorrt.CALLS if call[0] == what]


def test_a_plan_is_written_and_its_network_reported(tmp_path: Path) -> None:
    report = work(job_of(tmp_path))
    assert (tmp_path / "backbone.plan").read_bytes() == b"plan of backbone"
    assert report.error is None
    assert report.version == "11.4.0"
    assert report.inputs == (TensorSpec("x", "bfloat16", (-1, 4)),)
    assert report.outputs == (TensorSpec("y", "float32", (-1, 2)),)
    assert (report.layers, report.plan_bytes) == (2, 16)
    assert calls("profile") == [("profile", {"x": ((1, 4), (3, 4), (3, 4))})]
    assert set(calls("clear")) == {("clear", "tf32")}
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == []


def test_plugins_are_registered_for_the_device_before_the_graph_is_parsed(tmp_path: Path) -> None:
    work(job_of(tmp_path, plugins=f"{FAKE}:register_plugins", aliased_io=True))
    kinds = [call[0] for call in fake_tensorrt.CALLS]
    assert calls("register") == [("register", 90)]
    assert kinds.index("register") < kinds.index("parse")
    assert calls("preview") == [("preview", "aliased", True)]


def test_control_without_plugins_none_are_registered_and_no_preview_is_asked_for(tmp_path: Path) -> None:
    work(job_of(tmp_path))
    assert calls("register") == calls("preview") == []


def test_a_timing_cache_is_read_and_written(tmp_path: Path) -> None:
    known = tmp_path / "timing.cache"
    for expected in (b"+", b"++"):
        work(job_of(tmp_path, timing_cache=str(known)))
        assert known.read_bytes() == expected


@pytest.mark.parametrize(
    ("graph", "reason"),
    [("unbuildable", "no kernel for this layer"), ("unknown", f"{fake_tensorrt.REFUSAL}: not found")],
)
def test_what_the_library_refuses_is_reported_and_leaves_no_plan(tmp_path: Path, graph: str, reason: str) -> None:
    report = work(job_of(tmp_path, graph))
    assert report.error == reason
    assert not (tmp_path / f"{graph}.plan").exists()
    assert work(job_of(tmp_path)).error is None, "control: another graph is built"


def test_an_input_without_a_shape_is_reported(tmp_path: Path) -> None:
    assert "input x that no profile" in str(work(job_of(tmp_path, profiles=({},))).error)


def test_a_plan_cut_short_is_never_seen_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        assert not (tmp_path / "backbone.plan").exists()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(worker.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            work(job_of(tmp_path))
    assert not (tmp_path / "backbone.plan").exists()
    assert list(tmp_path.glob("backbone.plan.*.partial")), "control: the plan had been begun"


def test_a_process_that_aborts_ends_alone_and_is_one_sentence(tmp_path: Path) -> None:
    assert run_job(job_of(tmp_path), "TensorRT", "backbone").error is None
    with refused("backbone with TensorRT", "SIGABRT", "assertion failed: creator", error=BuildError):
        run_job(job_of(tmp_path, "fatal"), "TensorRT", "backbone")  # The report before it is not taken for its own.
    assert run_job(job_of(tmp_path), "TensorRT", "backbone").error is None, "control: the next job is done"


def test_a_process_without_the_library_is_one_sentence(tmp_path: Path) -> None:
    with refused("ended with code 1", "No module named", error=BuildError):
        run_job(job_of(tmp_path, module="no_such_library"), "TensorRT", "backbone")


def test_a_refusal_names_library_version_graph_and_reason(tmp_path: Path) -> None:
    with refused("TensorRT 11.4.0 cannot build the graph backbone", "no kernel for this layer", error=BuildError):
        run_job(job_of(tmp_path, "unbuildable"), "TensorRT", "backbone")
