"""Time of work on a device, and how fast its memory is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_WARM = 3


@dataclass(frozen=True)
class Times:
    """Seconds of interleaved repetitions."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median * 1e6:.1f} us ({self.least * 1e6:.1f}..{self.greatest * 1e6:.1f})"


class Clock:
    """Measures on one device.

    Args:
        repeats: of every measurement.
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device, self._repeats = device, repeats

    def times(self, *works: Callable[[], object]) -> list[Times]:
        """Median, least and greatest time of each, run in turns so that a disturbance meets all of them."""
        for work in works:
            for _ in range(min(_WARM, self._repeats - 1)):
                work()
        taken: list[list[float]] = [[] for _ in works]
        for _ in range(self._repeats):
            for place, work in enumerate(works):
                taken[place].append(self._one(work))
        return [Times(statistics.median(times), min(times), max(times)) for times in taken]

    def launches(self, works: list[Callable[[], object]]) -> Times:
        """Time of one of several like pieces of work, run one after the other.

        On a device they are captured and replayed, so that the host's time between them does not count; with
        buffers of their own that are larger together than the caches, their data comes from memory.
        """
        if self._device.type != "cuda":
            (times,) = self.times(lambda: [work() for work in works])
        else:
            for work in works:
                work()
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for work in works:
                    work()
            (times,) = self.times(graph.replay)
        return Times(times.median / len(works), times.least / len(works), times.greatest / len(works))

    def bandwidth(self, size: int) -> float:
        """Bytes a second of a copy of `size` bytes, read and written counted."""
        source = torch.zeros(size, dtype=torch.uint8, device=self._device)
        target = torch.zeros_like(source)
        (times,) = self.times(lambda: target.copy_(source))
        return 2 * size / times.median

    def _one(self, work: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = _event(), _event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
