"""Opening a bundle with PyTorch."""

from __future__ import annotations

import torch

from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph
from mtp_engines.backends.options import EngineOptions
from mtp_engines.backends.torch.engine import TorchEngine
from mtp_engines.bundle import Bundle
from mtp_engines.contracts.manifest import BackendBuild
from mtp_engines.errors import BundleError


def open_bundle_here(bundle: Bundle, options: EngineOptions) -> TorchEngine:
    """Open a bundle on a CUDA device or a CPU.

    Raises:
        BundleError: there is no such device here, or a part of the model has no form for a GPU yet.
    """
    manifest = bundle.manifest
    kind = options.device or (manifest.device if manifest.backend == "torch" else "cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BundleError(
            "The torch backend found no CUDA device here. Use --device cpu, which is slow and meant for comparison, or "
            "--backend onnxruntime."
        )
    if kind == "cpu" and options.threads:
        torch.set_num_threads(options.threads)
    build = manifest.backends.get(f"torch-{kind}", BackendBuild("bf16" if kind == "cuda" else "fp32"))
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    engine = TorchEngine(
        manifest.model,
        manifest.limits,
        load_graph,
        bundle.backbone,
        bundle.mtp,
        device=device,
        precision=build.precision,
        skinny=build.products == "skinny",
        graphs=options.graphs,
    )
    engine.numerics = build.promise_on(engine.runs_on)
    return engine
