"""Sessions of ONNX Runtime that read and write tensors of PyTorch where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import onnxruntime as ort
import torch

from mtp_engines.backends.gpu.executor import Enqueue, Graph, Tensors
from mtp_engines.backends.onnxruntime_cpu.sessions import open_session
from mtp_engines.backends.onnxruntime_cuda.weights import CastWeights
from mtp_engines.errors import BundleError

Provider = Literal["CPUExecutionProvider", "CUDAExecutionProvider"]
_ELEMENTS = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int64: ir.DataType.INT64,
    torch.int32: ir.DataType.INT32,
}


class OrtExecutor:
    """See `mtp_engines.backends.gpu.executor.Executor`.

    On a CUDA device all sessions share one stream of their own, since ONNX Runtime takes no default stream from
    outside. Events order it with PyTorch's current stream; the host waits for neither.
    """

    paged = False
    capturable = False

    def __init__(
        self,
        graphs: Mapping[Graph, ir.Model],
        folder: Path,
        device: torch.device,
        cache_dtype: torch.dtype,
        *,
        provider: Provider,
        threads: int = 0,
    ) -> None:
        """Open a session for each graph.

        Args:
            graphs: lowered models.
            folder: directory of the bundle's weight file.
            device: where the tensors lie; a CUDA device with its index for the CUDA provider.
            cache_dtype: of the caches.
            provider: what runs the graphs.
            threads: intra-op threads on a CPU; 0 chooses.

        Raises:
            BundleError: ONNX Runtime refuses a graph.
        """
        self.device, self.cache_dtype = device, cache_dtype
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if provider == "CUDAExecutionProvider"
            else None
        )
        options: dict[str, str] = {}
        if self._stream is not None:
            options = {"device_id": str(device.index), "user_compute_stream": str(self._stream.cuda_stream)}
        # Kept as long as the sessions: on a CPU these are the weights that they read.
        self._weights = CastWeights()
        self._sessions: dict[Graph, ort.InferenceSession] = {}
        for name, model in graphs.items():
            weights = self._weights.take(model.graph)
            session = open_session(model, folder, threads=threads, providers=[(provider, options)], weights=weights)
            check_provider(session, provider)
            self._sessions[name] = session
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def bind(self, graph: Graph, feeds: Tensors, into: Tensors) -> Enqueue:
        """Bind a graph to tensors that stay where they are."""
        session = self._sessions[graph]
        binding = session.io_binding()
        known = {value.name for value in session.get_inputs()}
        used = {name: tensor for name, tensor in feeds.items() if name in known}
        memory = [self._bind(binding.bind_input, name, tensor) for name, tensor in used.items()]
        memory += [self._bind(binding.bind_output, name, tensor) for name, tensor in into.items()]

        def enqueue(keep: object = memory) -> None:
            if self._stream is None:
                session.run_with_iobinding(binding, self._options)
                return
            current = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(current)
            session.run_with_iobinding(binding, self._options)
            current.wait_stream(self._stream)

        return enqueue

    def _bind(self, bind: Callable[..., Any], name: str, tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.is_contiguous() and tensor.device == self.device
        # An empty tensor has no memory, and ONNX Runtime takes no null pointer.
        memory = tensor if tensor.numel() else torch.zeros(1, dtype=tensor.dtype, device=tensor.device)
        index = self.device.index or 0
        element = int(_ELEMENTS[tensor.dtype])
        bind(name, self.device.type, index, element, list(tensor.shape), memory.data_ptr())
        return memory


def check_provider(session: ort.InferenceSession, provider: Provider) -> None:
    """Refuse a session that fell back to another provider, which could not read the device's memory.

    Raises:
        BundleError: it did.
    """
    if session.get_providers()[0] != provider:
        raise BundleError(
            f"ONNX Runtime {ort.__version__} could not load its {provider} and took {session.get_providers()[0]}. "
            "Install onnxruntime-gpu[cuda,cudnn] and an NVIDIA driver that fits it, or use --device cpu."
        )
