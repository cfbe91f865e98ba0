"""TensorRT engines as an executor: one context for each binding, so that each can live in a CUDA graph of its own."""

from __future__ import annotations

from pathlib import Path

import tensorrt as trt
import torch

from mtp_engines.backends.gpu.executor import Enqueue, Graph, Tensors
from mtp_engines.backends.tensorrt.profiles import profile_of
from mtp_engines.contracts import names
from mtp_engines.contracts.engines import EngineFile
from mtp_engines.errors import BundleError

_FILES: dict[Graph, str] = {"backbone": "backbone", "head": "head", "mtp": "mtp", "draft_head": "mtp_head"}


class TensorRtExecutor:
    """See `mtp_engines.backends.gpu.executor.Executor`.

    Contexts share one piece of memory for activations: they are enqueued on one stream, one after the other.

    Raises:
        BundleError: TensorRT does not take an engine, or would copy a state instead of writing it in place.
    """

    paged = True
    capturable = True

    def __init__(
        self,
        engines: tuple[EngineFile, ...],
        directory: Path,
        device: torch.device,
        cache_dtype: torch.dtype,
        max_batch: int,
    ) -> None:
        self.device, self.cache_dtype, self._max_batch = device, cache_dtype, max_batch
        runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._files = {file.graph: file for file in engines}
        self._engines = {name: _load(runtime, directory / file.file) for name, file in self._files.items()}
        for name, engine in self._engines.items():
            _check_in_place(engine, self._files[name])
        size = max(engine.device_memory_size_v2 for engine in self._engines.values())
        self._scratch = torch.empty(max(size, 1), dtype=torch.uint8, device=device)

    def bind(self, graph: Graph, feeds: Tensors, into: Tensors) -> Enqueue:
        """Bind a graph to tensors that stay where they are.

        Raises:
            BundleError: the engine has no profile for these shapes, or no output of a name that is wanted.
        """
        file, engine = self._files[_FILES[graph]], self._engines[_FILES[graph]]
        unknown = sorted(set(into) - {spec.name for spec in file.outputs})
        if unknown:
            raise BundleError(
                f"The engine {file.file} has no output {', '.join(unknown)}. Ask for it with --backend onnxruntime."
            )
        context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise BundleError(f"TensorRT made no context for the engine {file.file}; its own log above says why.")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        stream = torch.cuda.current_stream(self.device)
        profile = profile_of(file, {name: tuple(x.shape) for name, x in feeds.items()}, self._max_batch)
        taken = [context.set_optimization_profile_async(profile, stream.cuda_stream)]
        stream.synchronize()
        for spec in file.inputs:
            taken.append(context.set_input_shape(spec.name, tuple(feeds[spec.name].shape)))
            taken.append(context.set_tensor_address(spec.name, self._address(feeds[spec.name])))
        outputs = self._outputs(context, file, into)
        taken += [context.set_tensor_address(name, self._address(tensor)) for name, tensor in outputs.items()]
        if not all(taken):
            raise BundleError(f"TensorRT did not take the tensors of {file.file}; its own log above says which.")

        def enqueue() -> None:
            # `outputs` is named here so that what nobody asked for lives as long as the binding.
            if not context.execute_async_v3(torch.cuda.current_stream(self.device).cuda_stream):
                raise BundleError(f"TensorRT could not enqueue {file.file} with outputs {', '.join(outputs)}.")

        return enqueue

    def _address(self, tensor: torch.Tensor) -> int:
        """Where a tensor lies; an empty one has no place of its own, and TensorRT wants one."""
        return tensor.data_ptr() or self._scratch.data_ptr()

    def _outputs(self, context: trt.IExecutionContext, file: EngineFile, into: Tensors) -> dict[str, torch.Tensor]:
        """A tensor for every output: the caller's, or one of our own where he wants none."""
        outputs = {}
        for spec in file.outputs:
            if spec.name in into:
                outputs[spec.name] = into[spec.name]
            else:
                shape, dtype = tuple(context.get_tensor_shape(spec.name)), getattr(torch, spec.dtype)
                outputs[spec.name] = torch.empty(shape, dtype=dtype, device=self.device)
        return outputs


def _load(runtime: trt.Runtime, path: Path) -> trt.ICudaEngine:
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        raise BundleError(
            f"TensorRT {trt.__version__} does not open {path}. Build the engines again on this machine with "
            "`mtp-export build --backend tensorrt`."
        )
    return engine


def _check_in_place(engine: trt.ICudaEngine, file: EngineFile) -> None:
    """Every cache and state has to be written where it is read, or the next call would not see it."""
    for spec in file.outputs:
        if spec.name.startswith("present"):
            source = spec.name.replace("present", "past_key_values" if names.is_cache(spec.name) else "past", 1)
            if engine.get_aliased_input_tensor(spec.name) != source:
                raise BundleError(
                    f"TensorRT does not write {spec.name} in place in {file.file}. Build the engines again with the "
                    "TensorRT that is installed here."
                )
