"""What an operator of the interpreter is given, and the table that finds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tensor = torch.Tensor
Values = Sequence[Tensor]


@dataclass(frozen=True)
class Call:
    """One node with its values.

    Attributes:
        inputs: None for an optional input that is left out.
        attributes: by name, as Python values; a graph attribute is `subgraph`.
        outputs: how many the node has.
        device: where the graph runs.
        subgraph: runs the body of a Scan on these inputs.
        into: a buffer that an output may be written into at once, by its place.
    """

    inputs: Sequence[Tensor | None]
    attributes: dict[str, Any]
    outputs: int
    device: torch.device
    subgraph: Callable[[Sequence[Tensor]], list[Tensor]] | None = None
    into: dict[int, Tensor] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Tensor:
        """An input that must be there."""
        value = self.inputs[index]
        assert value is not None
        return value

    def optional(self, index: int) -> Tensor | None:
        """An input that may be left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def ints(self, index: int) -> list[int]:
        """An input that is a list of sizes, axes or places, which always lies on the host."""
        return [int(value) for value in self[index].reshape(-1).tolist()]


Operator = Callable[[Call], Values]
OPERATORS: dict[str, Operator] = {}
ATTRIBUTES: dict[str, frozenset[str]] = {}
"""The attributes that each operator takes into account; a node with another one is refused."""
MOST_INPUTS: dict[str, int] = {}
"""How many inputs each operator takes into account, where it has optional ones that it does not."""


def operator(*names: str, attributes: str = "", inputs: int | None = None) -> Callable[[Operator], Operator]:
    """Enter a function for the standard operators of these names.

    Args:
        attributes: names of those that it takes into account, with spaces.
        inputs: of how many, where the operator has optional ones behind them.
    """

    def enter(function: Operator) -> Operator:
        OPERATORS.update(dict.fromkeys(names, function))
        ATTRIBUTES.update(dict.fromkeys(names, frozenset(attributes.split())))
        if inputs is not None:
            MOST_INPUTS.update(dict.fromkeys(names, inputs))
        return function

    return enter
