"""Triton in processes of their own, so that a test sees it as a function on NumPy arrays.

Triton reads TRITON_INTERPRET when it is imported, and importing torch may import it; whether a kernel runs on the
CPU or compiles is therefore settled once for each process. The tests' own process imports neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np

from mtp_plugins.triton_kernels.launch import Launch

Arrays = dict[str, np.ndarray]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def missing() -> list[str]:
    """Packages that the kernels' tests need and this environment lacks; looks without importing."""
    return [name for name in ("triton", "torch") if importlib.util.find_spec(name) is None]


class Worker:
    """One spawned process in which Triton interprets kernels, or compiles them."""

    def __init__(self, *, interpret: bool, cache: str) -> None:
        context = multiprocessing.get_context("spawn")
        environment = {"TRITON_INTERPRET": "1" if interpret else "0", "TRITON_CACHE_DIR": cache}
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_set, initargs=(environment,))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function`, importable by name, returns or raises there."""
        return self._pool.submit(function, *arguments).result()

    def close(self) -> None:
        """Wait for the process to end."""
        self._pool.shutdown()


def run_kernel(module: str, name: str, launch: Launch, arguments: Mapping[str, np.ndarray | str]) -> Arrays:
    """Interpret a kernel once; runs in the worker.

    `arguments` has an entry for each pointer parameter, in order: an array, or the name of an earlier one whose
    memory it shares. Returns all arrays as the kernel left them.
    """
    import torch

    tensors: dict[str, Any] = {}
    for key, value in arguments.items():
        tensors[key] = tensors[value] if isinstance(value, str) else _tensor(torch, value)
    launch.run(getattr(importlib.import_module(module), name), *tensors.values())
    return {key: _array(torch, tensor) for key, tensor in tensors.items()}


def _set(environment: Mapping[str, str]) -> None:
    os.environ.update(environment)


def _tensor(torch: Any, array: np.ndarray) -> Any:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _array(torch: Any, tensor: Any) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()
