"""Sessions over single canonical nodes that are lowered to kernels of our own."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from mtp_engines.kernels.library import path_of_kernels
from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_engines.lowering.own_kernels import KERNELS
from mtp_plugins.graph import CONTRIB, DOMAIN, GraphBuilder


def open_lowered(g: GraphBuilder, threads: int = 1, packed: PackedMatrices | None = None) -> ort.InferenceSession:
    """The graph of a builder with its canonical nodes replaced."""
    model = lower(g.model(domains=[DOMAIN]), packed=packed or PackedMatrices())
    domains = {node.domain for node in model.graph}
    assert KERNELS in domains, "nothing was lowered to a kernel of ours"
    assert CONTRIB not in domains, "ONNX Runtime computes a part"
    return open_model(model, threads)


def open_model(model: ir.Model, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    options.register_custom_ops_library(str(path_of_kernels()))
    payload = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(payload, options, providers=["CPUExecutionProvider"])


def constant(g: GraphBuilder, name: str, array: np.ndarray) -> ir.Value:
    """An initializer."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    g.initializers[name] = value
    return value


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
