"""How long each kernel takes against the bytes that it has to move."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from mtp_engines.backends.torch.call import Call, Operator, Tensor
from mtp_tools.device.cases import Case, Cases, Sizes
from mtp_tools.device.clock import Clock, Times
from mtp_tools.device.results import Results

_CACHES, _MOST_COPIES = 256 << 20, 24


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
        times = self._clock.launches([partial(kernel, call) for call in _copies(case)])
        self._results.measured("times", f"{case.operator} M={rows}", _against(times, floor_bytes, bandwidth))

    def _product(self, rows: int, bandwidth: float) -> None:
        s = self._sizes
        case = self._cases.product(rows, s.hidden, s.intermediate)
        floor = case.inputs[1].numel() * case.inputs[1].itemsize
        self._one(case, rows, floor, bandwidth)
        theirs = self._clock.launches([partial(_library, call) for call in _copies(case)])
        self._results.measured("times", f"library product M={rows}", _against(theirs, floor, bandwidth))


def _library(call: Call) -> Tensor:
    return torch.matmul(call[0], call[1].T)


def _copies(case: Case) -> list[Call]:
    """The call on tensors of its own, so often that all of them together are larger than any cache."""
    device = case.inputs[0].device
    size = sum(x.numel() * x.itemsize for x in case.inputs)
    count = max(2, min(_MOST_COPIES, _CACHES // size)) if device.type == "cuda" else 1
    return [Call([x.clone() for x in case.inputs], {}, case.outputs, device) for _ in range(count)]


def _against(times: Times, floor_bytes: int, bandwidth: float) -> str:
    if not floor_bytes:
        return str(times)
    floor = floor_bytes / bandwidth
    return f"{times}, byte floor {floor * 1e6:.1f} us, {times.median / floor:.1f}x"
