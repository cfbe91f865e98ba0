"""The PyTorch engine: a bundle's graphs, lowered for a GPU and run by the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import torch

from mtp_engines.backends.gpu.engine import Canonical, DeviceEngine, lower_graphs
from mtp_engines.backends.gpu.executor import Enqueue, Graph, Tensors
from mtp_engines.backends.gpu.widths import widths_of
from mtp_engines.backends.torch.interpreter import Interpreter
from mtp_engines.backends.torch.kernels import kernels_for
from mtp_engines.backends.torch.tensors import dtype_of
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.lowering.paged import lower_paged, skinny_products
from mtp_engines.lowering.precision import WEIGHT_TYPES, Precision


class TorchExecutor:
    """See `mtp_engines.backends.gpu.executor.Executor`."""

    paged = True
    capturable = True

    def __init__(
        self,
        graphs: dict[Graph, ir.Model],
        device: torch.device,
        cache_dtype: torch.dtype,
        weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.device, self.cache_dtype = device, cache_dtype
        shared = {} if weights is None else weights
        kernels = kernels_for(device)
        self._graphs = {name: Interpreter(model, device, kernels, shared) for name, model in graphs.items()}

    def bind(self, graph: Graph, feeds: Tensors, into: Tensors) -> Enqueue:
        """Bind a graph to tensors that stay where they are."""
        interpreter = self._graphs[graph]
        return lambda: interpreter.run(feeds, into)


class TorchEngine(DeviceEngine):
    """A bundle on PyTorch; see `mtp_engines.engine.Engine`."""

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
        skinny: bool = False,
        graphs: bool = True,
        weights: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Lower the canonical graphs and copy their weights to the device.

        Args:
            spec: what the graphs were built from.
            limits: what the bundle was built for.
            load: reads a canonical graph.
            backbone, mtp: the graphs' files.
            device: a CPU, or a CUDA device with its index.
            precision: of weights and caches.
            skinny: products by `SkinnyProduct`, so that rows do not depend on their number.
            graphs: False runs without CUDA graphs.
            weights: those that are on the device already, by name, in the precision; the others are added.

        Raises:
            BundleError: a part of the model has no form for a GPU yet.
        """
        widest = limits.max_draft_tokens + 1
        lowered = lower_graphs(
            Canonical(spec, load, backbone, mtp),
            precision,
            lambda model: lower_paged(model, widest, skinny=skinny),
            lambda head: skinny_products(head, flat=True) if skinny else head,
        )
        executor = TorchExecutor(lowered, device, dtype_of(WEIGHT_TYPES[precision]), weights)
        super().__init__(executor, spec, limits, widths_of(limits, skinny=skinny), graphs=graphs)
