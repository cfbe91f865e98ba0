"""Opening a bundle with TensorRT."""

from __future__ import annotations

import tensorrt as trt
import torch

from mtp_engines.backends.gpu.engine import DeviceEngine
from mtp_engines.backends.gpu.widths import engine_widths, widths_of
from mtp_engines.backends.options import EngineOptions
from mtp_engines.backends.tensorrt.executor import TensorRtExecutor
from mtp_engines.backends.torch.tensors import dtype_of
from mtp_engines.builders.tensorrt.build import find_engines
from mtp_engines.bundle import Bundle
from mtp_engines.errors import BundleError
from mtp_engines.lowering.precision import WEIGHT_TYPES
from mtp_plugins.tensorrt_plugins.registration import register_all


def open_bundle_here(bundle: Bundle, options: EngineOptions) -> DeviceEngine:
    """Open the engines that were built in a bundle for this machine's GPU.

    Raises:
        BundleError: there is no such GPU, there are no engines for it, or they are of another version.
    """
    if not torch.cuda.is_available():
        raise BundleError("The tensorrt backend found no CUDA device here. Run the bundle with --backend onnxruntime.")
    manifest = bundle.manifest
    build = manifest.backends.get("tensorrt-cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    found = None
    if build is not None:
        widths, skinny = engine_widths(manifest.limits), build.products == "skinny"
        found = find_engines(bundle, "tensorrt", f"{major}.{minor}", build.precision, widths, skinny=skinny)
    if build is None or found is None:
        raise BundleError(
            f"{bundle.directory} has no engines of TensorRT {trt.__version__} for a GPU of compute capability "
            f"{major}.{minor}. Build them here with `mtp-export build --model {manifest.source} --out "
            f"{bundle.directory} --backend tensorrt`."
        )
    directory, engines = found
    # An engine with plugins can only be opened where they are registered.
    register_all(10 * major + minor)
    dtype, batch = dtype_of(WEIGHT_TYPES[build.precision]), manifest.limits.max_batch_size
    executor = TensorRtExecutor(engines, directory, device, dtype, batch)
    skinny = build.products == "skinny"
    engine = DeviceEngine(
        executor, manifest.model, manifest.limits, widths_of(manifest.limits, skinny=skinny), graphs=options.graphs
    )
    engine.numerics = build.promise_on(engine.runs_on)
    return engine
