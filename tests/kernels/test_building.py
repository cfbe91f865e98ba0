"""Compiling the kernels, and choosing between them and ONNX Runtime's."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtp_engines.errors import BundleError
from mtp_engines.kernels import build, library


def test_where_they_can_be_compiled_they_are_there() -> None:
    """A suite that tests nothing for want of a library must not pass where there could be one."""
    assert build.why_not_here() is not None or library.why_missing() is None


def test_a_library_is_compiled_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = tmp_path / "fine.so"
    assert build.compile_kernels(fine) is None
    assert fine.stat().st_size > 10_000
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-include", "no-such-header.h"))
    reason = build.compile_kernels(tmp_path / "broken.so")
    assert reason is not None
    assert "could not compile the CPU kernels" in reason
    assert [path.name for path in tmp_path.iterdir()] == ["fine.so"]


def test_without_a_compiler_or_elsewhere_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    reason = build.compile_kernels(tmp_path / "x.so")
    assert reason is not None
    assert "C++ compiler" in reason
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    reason = build.compile_kernels(tmp_path / "x.so")
    assert reason is not None
    assert "aarch64" in reason
    assert not list(tmp_path.iterdir())


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No answer from before; a changed environment is put back."""
    library.why_missing.cache_clear()
    monkeypatch.setattr(library, "why_missing", library.why_missing.__wrapped__)
    monkeypatch.delenv(library.CHOICE, raising=False)
    return monkeypatch


def test_libraries_that_must_not_be_used(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert library.why_missing() is None
    fresh.setattr(library, "source_digest", lambda: "of other sources")
    assert "other sources" in str(library.why_missing())
    fresh.setattr(library, "LIBRARY", tmp_path / "none.so")
    assert "not compiled" in str(library.why_missing())
    assert library.path_of_kernels() is None
    (tmp_path / "none.so").write_bytes(b"no library")
    assert "cannot be loaded" in str(library.why_missing())
    fresh.setenv(library.CHOICE, "own")
    with pytest.raises(BundleError, match="asks for the tool's own kernels, but they cannot be loaded"):
        library.path_of_kernels()


def test_who_decides(fresh: pytest.MonkeyPatch) -> None:
    assert library.path_of_kernels() == library.LIBRARY
    best = library.instructions()
    assert best in library.INSTRUCTIONS
    fresh.setenv(library.CHOICE, "own")
    assert library.path_of_kernels() == library.LIBRARY
    assert library.instructions() == best
    fresh.setenv(library.CHOICE, "own-avx2")
    assert library.path_of_kernels() == library.LIBRARY
    assert library.instructions() == "avx2"
    fresh.setenv(library.CHOICE, "onnxruntime")
    assert library.path_of_kernels() is None
    fresh.setenv(library.CHOICE, "fast")
    with pytest.raises(BundleError, match=r"MTP_CPU_KERNELS is 'fast'. It takes own, own-avx2, onnxruntime"):
        library.path_of_kernels()
