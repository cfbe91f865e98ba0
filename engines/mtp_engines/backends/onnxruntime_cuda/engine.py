"""The ONNX Runtime engine for a GPU; with the CPU provider it runs the same graphs for tests and comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import torch

from mtp_engines.backends.gpu.engine import Canonical, DeviceEngine, lower_graphs
from mtp_engines.backends.gpu.widths import widths_of
from mtp_engines.backends.onnxruntime_cuda.executor import OrtExecutor, Provider
from mtp_engines.backends.torch.tensors import dtype_of
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.lowering.onnxruntime_cuda import contrib_products, lower_onnxruntime_cuda
from mtp_engines.lowering.precision import WEIGHT_TYPES, Precision


class OrtCudaEngine(DeviceEngine):
    """A bundle on ONNX Runtime with the shared GPU runner; see `mtp_engines.engine.Engine`.

    Every session copies its weights to the device, so a matrix that two graphs use is there twice.
    """

    def __init__(
        self,
        spec: ModelSpec,
        limits: Limits,
        load: Callable[[Path], ir.Model],
        backbone: Path,
        mtp: tuple[Path, ...],
        *,
        device: torch.device,
        precision: Precision,
        grouped: bool | None = None,
        threads: int = 0,
    ) -> None:
        """Lower the canonical graphs and open their sessions.

        Args:
            spec: what the graphs were built from.
            limits: what the bundle was built for.
            load: reads a canonical graph.
            backbone, mtp: the graphs' files, in the folder of their weights.
            device: a CPU, or a CUDA device with its index.
            precision: of weights and caches.
            grouped: attention by GroupQueryAttention; None where its CUDA kernel takes the caches and the batch.
            threads: intra-op threads on a CPU; 0 chooses.

        Raises:
            BundleError: a part of the model has no form for this backend, or ONNX Runtime refuses a graph.
        """
        widest = limits.max_draft_tokens + 1
        group = limits.max_batch_size == 1 and precision != "fp32" if grouped is None else grouped
        lowered = lower_graphs(
            Canonical(spec, load, backbone, mtp),
            precision,
            lambda model: lower_onnxruntime_cuda(model, widest, grouped=group),
            contrib_products,
        )
        provider: Provider = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        cache_dtype = dtype_of(WEIGHT_TYPES[precision])
        executor = OrtExecutor(lowered, backbone.parent, device, cache_dtype, provider=provider, threads=threads)
        super().__init__(executor, spec, limits, widths_of(limits, skinny=False))
