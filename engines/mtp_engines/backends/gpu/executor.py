"""What a backend offers the sequences of this package: graphs that are bound to buffers once and enqueued often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch

Graph = Literal["backbone", "head", "mtp", "draft_head"]
Enqueue = Callable[[], None]
Tensors = Mapping[str, torch.Tensor]


class Executor(Protocol):
    """The graphs of one bundle on one device."""

    device: torch.device
    cache_dtype: torch.dtype
    paged: bool
    """Whether its graphs take caches in pages; otherwise dense ones."""
    capturable: bool
    """Whether what `bind` returns can be captured in a CUDA graph of the current stream."""

    def bind(self, graph: Graph, feeds: Tensors, into: Tensors) -> Enqueue:
        """Bind a graph to tensors that stay where they are; calling the result enqueues one run.

        Args:
            graph: which graph.
            feeds: a tensor for every input, by name; names that the graph does not have are left alone.
            into: a tensor for every output that is wanted, by name. A cache or state may be the tensor that
                its input is; the backend then writes it in place.
        """
