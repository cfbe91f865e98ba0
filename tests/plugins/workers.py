"""Triton in processes of their own, so that a test sees it as a function on NumPy arrays.

Triton reads TRITON_INTERPRET when it is imported, and importing torch may import it; whether a kernel runs on the
CPU or compiles is therefore settled once for each process. The tests' own process imports neither.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
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


@dataclass(frozen=True)
class Change:
    """A deliberate fault: the text of a kernel with `old`, which it has once, replaced by `new`; `folder` takes it."""

    folder: Path
    old: str
    new: str


def run_kernel(
    module: str,
    name: str,
    launch: Launch,
    inputs: Arrays,
    outputs: Mapping[str, np.ndarray | str],
    change: Change | None = None,
) -> Arrays:
    """Interpret a kernel once; runs in the worker.

    `inputs` and `outputs` have an entry for each pointer parameter, in order: an array, or the name of an earlier one
    whose memory it shares. Returns all arrays as the kernel left them.
    """
    import torch

    tensors: dict[str, Any] = {}
    for key, value in {**inputs, **outputs}.items():
        tensors[key] = tensors[value] if isinstance(value, str) else _tensor(torch, value)
    kernels = importlib.import_module(module) if change is None else _changed(module, change)
    launch.run(getattr(kernels, name), [tensors[key] for key in inputs], [tensors[key] for key in outputs])
    return {key: _array(torch, tensor) for key, tensor in tensors.items()}


def _changed(module: str, change: Change) -> Any:
    text = Path(str(importlib.import_module(module).__file__)).read_text(encoding="utf-8")
    assert text.count(change.old) == 1, f"{module} has {change.old!r} {text.count(change.old)} times"
    # Triton reads the source of a kernel, so it has to lie in a file.
    path = change.folder / "changed_kernel.py"
    path.write_text(text.replace(change.old, change.new), encoding="utf-8")
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location("changed_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    return changed


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
