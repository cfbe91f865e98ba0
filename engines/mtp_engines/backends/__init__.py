"""Backends: each opens a bundle as an engine."""

from __future__ import annotations

import onnxruntime as ort

from mtp_engines.backends.onnxruntime_cpu.engine import CpuEngine
from mtp_engines.bundle import WEIGHTS, Bundle
from mtp_engines.engine import Engine
from mtp_engines.errors import BundleError

# Measured with 20 MB of weights on two cores: a second thread gains a quarter on an idle machine and loses
# three quarters on a busy one, since the threads meet after every small matrix.
_ONE_THREAD_BYTES = 64 << 20


def open_engine(bundle: Bundle, threads: int = 0) -> Engine:
    """Open a bundle on the backend that its manifest names.

    Args:
        threads: intra-op threads of each session; 0 takes one for each physical core, or a single one
            for a model so small that waking a second thread costs more than it brings.

    Raises:
        BundleError: the backend is older than the one the bundle was built with, or refuses a graph.
    """
    manifest = bundle.manifest
    built, here = manifest.versions.get("onnxruntime", ""), str(ort.__version__)
    if _numbers(here) < _numbers(built):
        raise BundleError(
            f"{bundle.directory} was built with ONNX Runtime {built}, this machine has {here}. Install {built} or "
            f"newer, or build it again here with `mtp-export build --model {manifest.source} --out {bundle.directory}`."
        )
    if threads == 0 and manifest.files[WEIGHTS].size < _ONE_THREAD_BYTES:
        threads = 1
    return CpuEngine(
        manifest.model, manifest.limits, manifest.numerics.promise, bundle.backbone, bundle.mtp, threads=threads
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
