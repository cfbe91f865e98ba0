"""Between the tensors of a graph and those of PyTorch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.BOOL: torch.bool,
}


def dtype_of(dtype: ir.DataType | None) -> torch.dtype:
    """The type of PyTorch for a type of ONNX."""
    assert dtype is not None
    return _DTYPES[dtype]


def tensor_of(value: ir.TensorProtocol) -> torch.Tensor:
    """A copy of a constant, on the host."""
    return tensor_of_array(value.numpy())


def tensor_of_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """A copy of an array, on the host."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(array.view(np.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def array_of(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    """A copy as a float32 array, on the host."""
    array: npt.NDArray[np.float32] = tensor.detach().float().cpu().numpy().copy()
    return array


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A copy of the same type, on the host."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().copy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy().copy()


def name_of(device: torch.device) -> str:
    """`cpu`, or the compute capability of a CUDA device as in `sm_90`."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
