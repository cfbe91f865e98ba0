"""Opening a bundle with ONNX Runtime on a GPU."""

from __future__ import annotations

import onnxruntime as ort
import torch

from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph
from mtp_engines.backends.onnxruntime_cuda.engine import OrtCudaEngine
from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import Bundle
from mtp_engines.contracts.manifest import BackendBuild
from mtp_engines.errors import BundleError


def open_bundle_here(bundle: Bundle, options: EngineOptions) -> OrtCudaEngine:
    """Open a bundle on a CUDA device.

    Raises:
        BundleError: there is no such device or provider here, or a part of the model has no form for it yet.
    """
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise BundleError(
            f"ONNX Runtime {ort.__version__} has no CUDA provider here. Install onnxruntime-gpu[cuda,cudnn] in the "
            "place of onnxruntime, or run the bundle with --backend onnxruntime --device cpu."
        )
    if not torch.cuda.is_available():
        raise BundleError(
            "The onnxruntime backend was to run on cuda, and PyTorch found no CUDA device here. Use --backend "
            "onnxruntime --device cpu."
        )
    manifest = bundle.manifest
    build = manifest.backends.get("onnxruntime-cuda", BackendBuild("fp16"))
    if build.products != "library":
        raise BundleError(
            f"{bundle.directory} was built with --products {build.products}, which ONNX Runtime cannot run. Build it "
            "again with --products library."
        )
    engine = OrtCudaEngine(
        manifest.model,
        manifest.limits,
        load_graph,
        bundle.backbone,
        bundle.mtp,
        device=torch.device("cuda", torch.cuda.current_device()),
        precision=build.precision,
    )
    engine.numerics = build.promise_on(engine.runs_on)
    return engine
