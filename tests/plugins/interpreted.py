"""Runs the Triton kernels in Triton's interpreter, in a process of its own.

Triton decides at its import whether it interprets, and another test may have imported it (torch does) before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Arrays = dict[str, np.ndarray]
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Calls a function of this module in the interpreting process and returns its result."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_interpret) as pool:
        yield lambda function, *args, **kwargs: pool.submit(function, *args, **kwargs).result()


def append(x: Arrays, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Pages of keys and values in float32 after PagedKvAppend; values of x are rounded to `dtype`."""
    from mtp_plugins.paged_kv_append.launch import paged_kv_append

    t = _tensors(x, dtype)
    paged_kv_append(t["key"], t["value"], t["key_pages"], t["value_pages"], t["block_table"], t["lengths"])
    return t["key_pages"].float().numpy(), t["value_pages"].float().numpy()


def attend(
    x: Arrays,
    dtype: str,
    *,
    scale: float | None = None,
    tile: int | None = None,
    change: tuple[Path, str, str] | None = None,
) -> np.ndarray:
    """PagedAttention in float32; scratch and output begin as NaN.

    tile: keys in a tile, for a control. change: a folder for kernels whose text has the second string, found once,
        replaced by the third.
    """
    import torch

    from mtp_plugins.paged_attention import kernel, launch

    t = _tensors(x, dtype)
    sizes = tuple(t["query"].shape), tuple(t["key_pages"].shape), t["block_table"].shape[1]
    plan = launch.plan(*sizes, t["query"].element_size(), scale=scale)
    if tile is not None:
        plan.partial["BLOCK_N"] = tile
    scratch = tuple(torch.full(shape, torch.nan) for shape in plan.scratch)
    output = torch.full_like(t["query"], torch.nan)
    inputs = [t[name] for name in ("query", "key_pages", "value_pages", "block_table", "lengths")]
    kernels = kernel if change is None else _changed_kernels(*change)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("partial_kernel", "combine_kernel"):
            patch.setattr(launch, name, getattr(kernels, name))
        launch.paged_attention(*inputs, scratch, output, plan)
    return output.float().numpy()


def call(module: str, function: str, *args: Any) -> Any:
    """A function of a module that imports Triton."""
    return getattr(importlib.import_module(module), function)(*args)


def _interpret() -> None:
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"


def _tensors(x: Arrays, dtype: str) -> dict[str, Any]:
    import torch

    integers = ("block_table", "lengths")
    return {
        # A copy, since kernels write in place.
        name: torch.tensor(array, dtype=torch.int32 if name in integers else getattr(torch, dtype)).contiguous()
        for name, array in x.items()
    }


def _changed_kernels(folder: Path, old: str, new: str) -> Any:
    from mtp_plugins.paged_attention import kernel

    text = Path(str(kernel.__file__)).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"the kernels have {old!r} {text.count(old)} times"
    # Triton reads the source of a kernel, so it has to lie in a file.
    path = folder / "changed_kernel.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("changed_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
