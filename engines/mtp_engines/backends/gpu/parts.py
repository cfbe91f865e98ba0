"""Neighbouring sequences of a tensor."""

from __future__ import annotations

import torch

ALIGNMENT = 256
"""Bytes: what TensorRT may ask of an address; plugins are compiled for multiples of 16."""


class Part:
    """Some sequences of a tensor whose first axis they are, at an address that any kernel takes.

    Where a sequence is so short that the part begins between two such addresses, a copy is bound, which is brought up
    to date around a run.

    Attributes:
        view: the part itself.
        bound: what graphs read and write.
    """

    def __init__(self, whole: torch.Tensor, start: int, stop: int) -> None:
        self.view = whole[start:stop]
        offset = start * whole.stride(0) * whole.element_size()
        self.bound = torch.zeros_like(self.view) if offset % ALIGNMENT else self.view

    def load(self) -> None:
        """Before a run that reads."""
        if self.bound is not self.view:
            self.bound.copy_(self.view)

    def store(self) -> None:
        """After a run that wrote."""
        if self.bound is not self.view:
            self.view.copy_(self.bound)
