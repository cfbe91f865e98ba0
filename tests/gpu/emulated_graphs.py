"""CUDA graphs on a CPU: a graph remembers the operations of one run and the memory they used, and does them again.

As on a GPU, a capture changes nothing, a replay reads and writes the same memory, and what the host read or decided
during the capture stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class EmulatedGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.replays = 0

    def pool(self) -> str:
        """All graphs name the pool of the first."""
        return "pool"

    def replay(self) -> None:
        """Do everything again, into the memory of the first time."""
        self.replays += 1
        for function, arguments, named, results in self.steps:
            again = function(*arguments, **named)
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class _Recording(TorchDispatchMode):
    """Remembers every operation, and what memory held before it was first written."""

    def __init__(self, graph: EmulatedGraph) -> None:
        super().__init__()
        self._graph = graph
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        for place, expected in enumerate(function._schema.arguments):
            if expected.alias_info is not None and expected.alias_info.is_write:
                self._save(named[expected.name] if expected.name in named else arguments[place])
        results = function(*arguments, **named)
        self._graph.steps.append((function, arguments, named, results))
        return results

    def _save(self, written: torch.Tensor) -> None:
        storage = written.untyped_storage()
        if storage.data_ptr() not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage.data_ptr()] = whole, whole.clone()

    def undo(self) -> None:
        """A capture runs nothing."""
        for whole, before in self._before.values():
            whole.copy_(before)


@contextmanager
def _capturing(graph: EmulatedGraph, pool: str | None = None) -> Iterator[None]:
    recording = _Recording(graph)
    with recording:
        yield
    recording.undo()


def emulate(patch: pytest.MonkeyPatch) -> None:
    """Let `Captures` use emulated graphs."""
    patch.setattr(torch.cuda, "CUDAGraph", EmulatedGraph)
    patch.setattr(torch.cuda, "graph", _capturing)
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
