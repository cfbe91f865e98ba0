"""Sizes of one kernel launch, computed without triton, and the launch itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """Grid, compile-time constants and warps of one kernel at fixed sizes."""

    grid: tuple[int, int, int]
    constexprs: Mapping[str, int]
    num_warps: int

    def run(self, kernel: Any, *tensors: Any) -> None:
        """Run `kernel` on tensors in the order of its parameters, on the current stream of their device."""
        # A product and a sum must not become one rounding in one place and two in another, or a row of a verify
        # could differ from the same row alone: fusion is asked for by `fma` in the kernel, never left to a compiler.
        kernel[self.grid](*tensors, **self.constexprs, num_warps=self.num_warps, enable_fp_fusion=False)


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`; Triton's block sizes are powers of two."""
    return 1 << max(size - 1, 0).bit_length()
