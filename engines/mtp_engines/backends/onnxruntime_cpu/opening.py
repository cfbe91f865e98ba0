"""Opening a bundle with ONNX Runtime on a CPU."""

from __future__ import annotations

import onnxruntime as ort

from mtp_engines.backends.onnxruntime_cpu.engine import CpuEngine
from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import WEIGHTS, Bundle
from mtp_engines.errors import BundleError

# Measured with 20 MB of weights on two cores: a second thread gains a quarter on an idle machine and loses
# three quarters on a busy one, since the threads meet after every small matrix.
_ONE_THREAD_BYTES = 64 << 20


def open_bundle_here(bundle: Bundle, options: EngineOptions) -> CpuEngine:
    """Open a bundle.

    `options.threads` 0 takes one thread for each physical core, or a single one for a model so small that
    waking a second thread costs more than it brings.

    Raises:
        BundleError: ONNX Runtime is older than the one the bundle was built with, or refuses a graph.
    """
    manifest = bundle.manifest
    built, here = manifest.versions.get("onnxruntime", ""), str(ort.__version__)
    if _numbers(here) < _numbers(built):
        raise BundleError(
            f"{bundle.directory} was built with ONNX Runtime {built}, this machine has {here}. Install {built} or "
            f"newer, or build it again here with `mtp-export build --model {manifest.source} --out {bundle.directory}`."
        )
    threads = options.threads
    if threads == 0 and manifest.files[WEIGHTS].size < _ONE_THREAD_BYTES:
        threads = 1
    return CpuEngine(
        manifest.model, manifest.limits, manifest.numerics.promise, bundle.backbone, bundle.mtp, threads=threads
    )


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]
