"""CUDA graphs of work that is enqueued again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import torch

DEVICE_LOCK = threading.RLock()
"""Held by whoever enqueues, allocates or captures: a capture sees what every thread of the process does, PyTorch takes
one at a time, and engines share scratch memory. Threads take turns call by call, as their work would on one stream."""


MOST_GRAPHS = 512
"""Each takes memory; work beyond them runs eagerly."""


class Captures:
    """Runs work eagerly the first time, captures it the second time, and replays it from then on.

    The first run is the warm-up that a capture needs, and real work: nothing is run for nothing. All graphs share
    one pool of memory, since no two of them run at once.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled and device.type == "cuda"
        self._device = device
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    @property
    def count(self) -> int:
        """Graphs that were captured."""
        return len(self._graphs)

    def run(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Do the work that `key` stands for."""
        if not self.enabled:
            enqueue()
            return
        if key not in self._seen or (key not in self._graphs and len(self._graphs) >= MOST_GRAPHS):
            enqueue()
            self._seen.add(key)  # Only now: a capture after a run that failed would have no warm-up.
            return
        if key not in self._graphs:
            self._graphs[key] = self._capture(enqueue)
        self._graphs[key].replay()

    def _capture(self, enqueue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        torch.cuda.synchronize(self._device)
        with torch.cuda.graph(graph, pool=pool):
            enqueue()
        return graph
