"""What engines may be built with and for, and how everything else is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest

from mtp_engines.builders.tensorrt import target as module
from mtp_engines.builders.tensorrt.target import FLAVOURS, parse_capability, resolve_target
from mtp_engines.errors import BuildError
from tests.support import refused

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes the machine look as if one package were installed, and a GPU were in it."""

    def pretend(
        package: str | None, version: str = "", gpu: tuple[int, int] | None = None, *, polygraphy: bool = True
    ) -> None:
        modules = [flavour.module for flavour in FLAVOURS.values() if flavour.package == package]
        present = [*modules, "polygraphy"] if polygraphy else modules
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in present else None)

        def found(name: str) -> str:
            if name != package:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", found)
        monkeypatch.setattr(module, "local_capability", lambda: gpu)

    return pretend


def test_rtx_builds_for_devices_that_are_not_here(install: Install) -> None:
    install("tensorrt-rtx-cu13", "1.7.1.116")
    for capability, name in (("8.9", "sm_89"), ("12.0", "sm_120"), ("8.6", "sm_86")):
        found = resolve_target("tensorrt-rtx", capability)
        assert (found.name, found.version, found.flavour.module) == (name, "1.7.1.116", "tensorrt_rtx")
    assert resolve_target("tensorrt_rtx", "8.9") == resolve_target("tensorrt-rtx", "8.9")


@pytest.mark.parametrize(
    ("flavour", "capability", "parts"),
    [
        ("tensorrt_lean", "8.9", ("tensorrt_lean", "tensorrt-rtx, tensorrt")),
        ("tensorrt-rtx", "89", ("'89'", "8.9 or 12.0")),
        ("tensorrt-rtx", "sm_89", ("'sm_89'",)),
        ("tensorrt-rtx", "9.0", ("TensorRT-RTX", "9.0", "8.9, 12.0", "backend tensorrt")),
        ("tensorrt-rtx", "6.1", ("6.1",)),
        ("tensorrt", "6.1", ("TensorRT does not build", "9.0")),
    ],
)
def test_unknown_names_and_devices_are_refused(
    install: Install, flavour: str, capability: str, parts: tuple[str, ...]
) -> None:
    install("tensorrt-rtx-cu13", "1.7.1.116")
    with refused(*parts, error=BuildError):
        resolve_target(flavour, capability)


@pytest.mark.parametrize(("flavour", "capability"), [("tensorrt-rtx", "8.9"), ("tensorrt", "9.0")])
def test_an_absent_package_says_what_to_install(install: Install, flavour: str, capability: str) -> None:
    package = FLAVOURS[flavour].package
    install(package, "11.4.0", gpu=(9, 0), polygraphy=False)
    with refused("no Python module polygraphy", f"`pip install 'mtp-export[{flavour}]'`", error=BuildError):
        resolve_target(flavour, capability)
    install(None)
    with refused("not installed", f"`pip install 'mtp-export[{flavour}]'`", error=BuildError):
        resolve_target(flavour, capability)
    install(package, "11.4.0", gpu=(9, 0))
    assert resolve_target(flavour, capability), "control: installed, it is taken"


def test_an_old_package_is_refused(install: Install) -> None:
    install("tensorrt-rtx-cu13", "1.6.9")
    with refused("1.6.9", "1.7 or newer", "pip install --upgrade 'mtp-export[tensorrt-rtx]'", error=BuildError):
        resolve_target("tensorrt-rtx", "8.9")
    install("tensorrt-rtx-cu13", "1.10.0")
    assert resolve_target("tensorrt-rtx", "8.9").version == "1.10.0", "control: 10 is newer than 7"


@pytest.mark.parametrize(("gpu", "found"), [(None, "none was found"), ((8, 9), "8.9")])
def test_full_tensorrt_builds_only_for_the_gpu_that_is_here(install: Install, gpu: Any, found: str) -> None:
    install("tensorrt-cu13", "11.4.0", gpu=gpu)
    with refused("TensorRT builds for the GPU", found, "9.0", error=BuildError):
        resolve_target("tensorrt", "9.0")
    install("tensorrt-cu13", "11.4.0", gpu=(9, 0))
    assert resolve_target("tensorrt", "9.0").name == "sm_90", "control: with that GPU it does"


def test_a_package_of_another_name_is_found_by_its_module(monkeypatch: pytest.MonkeyPatch, install: Install) -> None:
    install("tensorrt-cu13", "11.4.0", gpu=(9, 0))
    versions = {"tensorrt_cu12": "11.5.0"}

    def found(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", found)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: {"tensorrt": ["tensorrt_cu12"]})
    assert resolve_target("tensorrt", "9.0").version == "11.5.0"


def test_capabilities_are_read_as_nvidia_writes_them() -> None:
    assert [parse_capability(text) for text in ("8.9", "12.0")] == [(8, 9), (12, 0)]


class Driver:
    """libcuda of a machine with one GPU of compute capability 12.1."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return int(self._failing == "cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        return int(self._failing == "cuDeviceGet")

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> int:  # noqa: N802
        number._obj.value = {75: 12, 76: 1}[attribute]
        return int(self._failing == "cuDeviceGetAttribute")


def test_the_driver_says_the_capability_of_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: Driver())
    assert module.local_capability() == (12, 1)
    for failing in ("cuInit", "cuDeviceGet", "cuDeviceGetAttribute"):
        monkeypatch.setattr(module.ctypes, "CDLL", lambda name, failing=failing: Driver(failing))
        assert module.local_capability() is None, failing


def test_a_machine_without_a_driver_has_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", absent)
    assert module.local_capability() is None
