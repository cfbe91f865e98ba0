"""Backends: each opens a bundle as an engine."""

from __future__ import annotations

import onnxruntime as ort

from mtp_engines.backends.onnxruntime_cpu.engine import CpuEngine
from mtp_engines.bundle import Bundle
from mtp_engines.engine import Engine
from mtp_engines.errors import BundleError


def open_engine(bundle: Bundle, threads: int = 0) -> Engine:
    """Open a bundle on the backend that its manifest names.

    Args:
        threads: intra-op threads of each session; 0 takes one for each physical core.

    Raises:
        BundleError: the backend is older than the one the bundle was built with, or refuses a graph.
    """
    manifest = bundle.manifest
    built, here = manifest.versions.get("onnxruntime", ""), str(ort.__version__)
    if _numbers(here) < _numbers(built):
        raise BundleError(
            f"{bundle.directory} was built with ONNX Runtime {built}, this machine has {here}. Install {built} or "
            "newer, or "
            f"build it again here with `mtp-export build --model {manifest.source} --out {bundle.directory}`."
        )
    return CpuEngine(
        manifest.model, manifest.limits, manifest.numerics.promise, bundle.backbone, bundle.mtp, threads=threads
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
