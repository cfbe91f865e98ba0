"""Engine files that were built from a bundle's graphs for one kind of device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an engine; an axis that differs between calls is -1."""

    name: str
    dtype: str
    """float32, bfloat16, float16, int64, int32 or bool."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class EngineFile:
    """One engine: what it computes, where it lies, and where it runs."""

    graph: str
    """`backbone`, `head`, `mtp` (further depths `mtp.1`, ...) or `mtp_head`."""
    file: str
    """Name below the directory of the engines."""
    backend: str
    """`tensorrt` or `tensorrt-rtx`."""
    version: str
    """Of the package that built it, which is the only one sure to open it."""
    target: str
    """Compute capability, as in `sm_89`."""
    precision: str
    """`fp32`, `bf16` or `fp16`: of weights and caches; everything else is float32."""
    rows: tuple[int, ...]
    """Rows of a call, one optimisation profile each, in their order. A vocabulary head has profiles for up to as many
    rows of each sequence of a batch, and none for prefill. A draft head that takes its own rows as another input than
    the target's has one more, at the end, for one row of its own."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
