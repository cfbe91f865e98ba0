"""How long each kernel takes against the bytes that it has to move."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mtp_engines.backends.torch.call import Call, Operator, Tensor
from mtp_tools.device.cases import Case, Cases, Sizes
from mtp_tools.device.clock import Clock, Times
from mtp_tools.device.results import Results


class KernelTimes:
    """Times of all kernels on one device, in bf16 on a GPU."""

    def __init__(
        self, kernels: Mapping[str, Operator], sizes: Sizes, clock: Clock, results: Results, device: torch.device
    ) -> None:
        self._kernels, self._sizes, self._clock, self._results = kernels, sizes, clock, results
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._cases = Cases(sizes, device, self._dtype, 11)

    def run(self, rows: tuple[int, ...], bandwidth: float) -> None:
        """Every kernel for every number of rows; `bandwidth` is that of a copy, in bytes a second."""
        s, item = self._sizes, self._dtype.itemsize
        for count in rows:
            state = s.batch * s.value_heads * s.delta_dim**2 * 4
            # A read and a write of the state; rows and factors are small beside it.
            self._one(self._cases.delta(count, min(count, s.staged_rows)), count, 2 * state, bandwidth)
            self._one(self._cases.conv(count, min(count, s.staged_rows)), count, 0, bandwidth)
            cache = 2 * s.batch * s.context * s.kv_heads * s.head_dim * item
            self._one(self._cases.attention(count), count, cache, bandwidth)
            self._product(count, bandwidth)

    def _one(self, case: Case, rows: int, floor_bytes: int, bandwidth: float) -> None:
        kernel = self._kernels[case.operator]
        call = Call(case.inputs, {}, case.outputs, case.inputs[0].device)
        (times,) = self._clock.times(lambda: kernel(call))
        self._results.measured("times", f"{case.operator} M={rows}", _against(times, floor_bytes, bandwidth))

    def _product(self, rows: int, bandwidth: float) -> None:
        s = self._sizes
        case = self._cases.product(rows, s.hidden, s.intermediate)
        x, weight = case.inputs
        kernel = self._kernels["SkinnyProduct"]
        call = Call([x, weight], {}, 1, x.device)

        def library() -> Tensor:
            return torch.matmul(x, weight.T)

        skinny, theirs = self._clock.times(lambda: kernel(call), library)
        floor = weight.numel() * weight.itemsize
        self._results.measured("times", f"SkinnyProduct M={rows}", _against(skinny, floor, bandwidth))
        self._results.measured("times", f"library product M={rows}", _against(theirs, floor, bandwidth))


def _against(times: Times, floor_bytes: int, bandwidth: float) -> str:
    if not floor_bytes:
        return str(times)
    floor = floor_bytes / bandwidth
    return f"{times}, byte floor {floor * 1e6:.1f} us, {times.median / floor:.1f}x"
