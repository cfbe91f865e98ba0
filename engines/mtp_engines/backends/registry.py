"""Which function opens which backend; a new backend is a folder and a line here."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from mtp_engines.backends.options import BACKENDS, EngineOptions
from mtp_engines.bundle import Bundle
from mtp_engines.engine import Engine
from mtp_engines.errors import BundleError

Opener = Callable[[Bundle, EngineOptions], Engine]

# Names, so that a backend's libraries are imported only where it is used.
_OPENERS = {
    "onnxruntime-cpu": "mtp_engines.backends.onnxruntime_cpu.opening",
    "onnxruntime-cuda": "mtp_engines.backends.onnxruntime_cuda.opening",
    "torch-cpu": "mtp_engines.backends.torch.opening",
    "torch-cuda": "mtp_engines.backends.torch.opening",
    "tensorrt-cuda": "mtp_engines.backends.tensorrt.opening",
}
_EXTRAS = {"onnxruntime": "torch"}
"""The extra that has what a backend needs, where it is not called like the backend."""
_USUAL_DEVICE = {"onnxruntime": "cpu", "torch": "cuda", "tensorrt": "cuda"}


def open_engine(bundle: Bundle, options: EngineOptions | None = None) -> Engine:
    """Open a bundle on the backend that was asked for, or that it was built for.

    Raises:
        BundleError: there is no such backend or device, a library is missing or too old, or a graph is refused.
    """
    options = options or EngineOptions()
    backend = options.backend or bundle.manifest.backend
    device = options.device or (bundle.manifest.device if options.backend is None else _USUAL_DEVICE.get(backend))
    name = f"{backend}-{device}"
    if name not in _OPENERS:
        raise BundleError(_unknown(backend, device))
    try:
        opener: Opener = import_module(_OPENERS[name]).open_bundle_here
    except ImportError as error:
        if (error.name or "mtp_").startswith("mtp_"):
            raise  # A fault of ours, which no installation mends.
        raise BundleError(
            f"The backend {backend} on {device} needs the package {error.name}, which is not installed. Install it "
            f"with `pip install 'mtp-export[{_EXTRAS.get(backend, backend)}]'`, or run the bundle with --backend "
            "onnxruntime --device cpu."
        ) from error
    return opener(bundle, options)


def _unknown(backend: str, device: str | None) -> str:
    devices = [name.removeprefix(f"{backend}-") for name in _OPENERS if name.startswith(f"{backend}-")]
    if backend == "tensorrt-rtx":
        return (
            "This release builds engines for TensorRT-RTX and does not run them. Run the bundle with --backend "
            "onnxruntime."
        )
    if not devices:
        return f"There is no backend {backend!r}; use one of: {', '.join(BACKENDS)}."
    return f"The backend {backend} does not run on the device {device!r}; use {' or '.join(devices)}."
