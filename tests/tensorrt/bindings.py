"""The Python bindings of TensorRT, imported over a stub of its libraries, in a process of their own.

Their wheels are small and come from the public index; the libraries do not. The lean runtime, which does, has a real
registry of plugins.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STUB = Path(__file__).with_name("stub.c")
INSTALLED = "11.4.0.106"
OLDER = "10.16.1.11"
PACKAGES = ("tensorrt-cu13-bindings", "tensorrt-lean-cu13-libs")


@dataclass(frozen=True)
class Bindings:
    """One version of the bindings with its stub and its lean runtime; `packages` is None for the environment's."""

    version: str
    stub: Path
    packages: Path | None

    @property
    def major(self) -> str:
        """First part of the version, which the names of libraries have."""
        return self.version.split(".")[0]


def missing() -> str | None:
    """Why the bindings cannot be tested here; looks without importing."""
    absent = [name for name in ("tensorrt_bindings", "tensorrt_lean_libs") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed: python -m pip install -e '.[dev]'"
    return None if compiler() else "no C compiler (cc) for the stub of TensorRT's libraries"


def compiler() -> str | None:
    """The C compiler."""
    return shutil.which("cc") or shutil.which("gcc")


def download(version: str, folder: Path) -> str | None:
    """Put another version of the wheels into `folder`; the reason if the index does not give them."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    limits = ["--retries", "0", "--timeout", "10", "--target", str(folder)]
    wanted = [f"{name}=={version}" for name in PACKAGES]
    result = subprocess.run([*pip, *limits, *wanted], capture_output=True, text=True, check=False)
    return None if result.returncode == 0 else (result.stderr.strip().splitlines() or ["pip failed"])[-1]


def compile_stub(folder: Path, version: str) -> Path:
    """The stub under the names of TensorRT's three libraries; the first has the symbols."""
    major, cc = version.split(".")[0], compiler()
    assert cc is not None
    for name, source in (("nvinfer", STUB), ("nvinfer_plugin", "/dev/null"), ("nvonnxparser", "/dev/null")):
        library = f"lib{name}.so.{major}"
        command = [cc, "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", folder / library, "-x", "c", source]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def load(bindings: Bindings) -> str:
    """Import them as `tensorrt`, once, and return their version; in a worker."""
    import numpy as np

    del np  # Before the stub, so that an error of it is not taken for one of the bindings.
    if bindings.packages is not None:
        sys.path.insert(0, str(bindings.packages))
    names = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
    stub, *_ = [
        ctypes.CDLL(str(bindings.stub / f"lib{name}.so.{bindings.major}"), mode=ctypes.RTLD_GLOBAL) for name in names
    ]
    spec = importlib.util.find_spec("tensorrt_lean_libs")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    lean = ctypes.CDLL(str(folder / f"libnvinfer_lean.so.{bindings.major}"))
    lean.getPluginRegistry.restype = ctypes.c_void_p
    stub.set_plugin_registry.argtypes = [ctypes.c_void_p]
    stub.set_plugin_registry(lean.getPluginRegistry())
    # The package `tensorrt` of a whole installation only passes on what the bindings have.
    module = importlib.import_module("tensorrt_bindings")
    sys.modules["tensorrt"] = module
    importlib.import_module("tensorrt.plugin")
    return str(module.__version__)


def builder_error() -> str:
    """What making a builder says; in a worker."""
    import tensorrt as trt

    try:
        trt.Builder(trt.Logger())
    except TypeError as error:
        return str(error)
    return "none"


def creators() -> list[str]:
    """Names of all plugins in the registry; in a worker."""
    import tensorrt as trt

    return [f"{creator.plugin_namespace}::{creator.name}" for creator in _all(trt)]


def _all(trt: Any) -> list[Any]:
    return list(trt.get_plugin_registry().all_creators)
