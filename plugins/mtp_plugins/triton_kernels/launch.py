"""Sizes of one kernel launch, computed without triton, and the launch itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """Grid, integers, compile-time constants and warps of one kernel at fixed sizes.

    The parameters of a kernel are its inputs, `scalars` in their order, its outputs and `constexprs`: as a quickly
    deployable plugin of TensorRT passes them. Only `grid` and `scalars` may depend on the number of rows.
    """

    grid: tuple[int, int, int]
    scalars: Mapping[str, int]
    constexprs: Mapping[str, int | float]
    num_warps: int
    num_stages: int = 3

    def run(self, kernel: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Run `kernel` on tensors in the order of its parameters, on the current stream of their device."""
        kernel[self.grid](
            *inputs,
            *self.scalars.values(),
            *outputs,
            **self.constexprs,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            # A product and a sum must not become one rounding in one place and two in another, or a row of a verify
            # could differ from the same row alone: a kernel asks for fusion by `fma`, and no compiler decides it.
            enable_fp_fusion=False,
        )


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`; Triton's block sizes are powers of two."""
    return 1 << max(size - 1, 0).bit_length()


def blocks(size: int, block: int) -> int:
    """How many blocks of this length cover `size`, the last of them perhaps in part."""
    return (size + block - 1) // block


def pointers(element: str, *names: str) -> dict[str, str]:
    """Entries of a signature: the pointers of these inputs and outputs, to `element`."""
    return {f"{name}_ptr": f"*{element}" for name in names}


def check_page_size(page_size: int) -> None:
    """Raise ValueError if the kernels do not take pages of so many rows."""
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"The pages have {page_size} rows; the kernels need a power of two. Lay the cache out so.")
