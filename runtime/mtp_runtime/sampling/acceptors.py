"""The acceptors that a request can name: two that keep the target's law, and two that are lossy and say so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from mtp_engines.errors import RequestError
from mtp_runtime.sampling.accept import Verdict, coupled, rejection
from mtp_runtime.sampling.law import Law, Laws
from mtp_runtime.sampling.lossy import lossy_relaxed, lossy_typical
from mtp_runtime.sampling.stream import Stream

COUPLED, REJECTION, RELAXED, TYPICAL = "coupled", "rejection", "relaxed", "typical"
ACCEPTORS = (COUPLED, REJECTION, RELAXED, TYPICAL)
LOSSY = {RELAXED: ("relaxed_top_k", "relaxed_delta"), TYPICAL: ("typical_epsilon", "typical_delta")}
"""Lossy acceptors, and the options that each of them takes."""


def _known(name: str) -> str:
    if name not in ACCEPTORS:
        raise PydanticCustomError("acceptor", "{expected}", {"expected": f"expected one of {', '.join(ACCEPTORS)}"})
    return name


AcceptorName = Annotated[str, AfterValidator(_known)]


@dataclass(frozen=True)
class AcceptRule:
    """Which draft tokens are kept. The defaults of the lossy ones are those that their authors used.

    Attributes:
        name: one of `ACCEPTORS`.
        relaxed_top_k, relaxed_delta: see `lossy_relaxed`.
        typical_epsilon, typical_delta: see `lossy_typical`.

    Raises:
        RequestError: a number is out of range; names it.
    """

    name: str = COUPLED
    relaxed_top_k: int = 10
    relaxed_delta: float = 0.6
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.relaxed_top_k < 1:
            raise RequestError(f"relaxed_top_k is {self.relaxed_top_k}, expected 1 or more.")
        for name in ("relaxed_delta", "typical_epsilon"):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(f"{name} is {getattr(self, name)}, expected 0 to 1.")
        if not (math.isfinite(self.typical_delta) and self.typical_delta >= 0):
            raise RequestError(f"typical_delta is {self.typical_delta}, expected a finite number, 0 or more.")

    @property
    def is_lossy(self) -> bool:
        """Whether it keeps draft tokens that the target's law would not."""
        return self.name in LOSSY

    def judge(
        self,
        laws: Laws,
        draft: Sequence[int],
        position: int,
        stream: Stream,
        draft_laws: Sequence[Law] | None,
        judges: Laws,
    ) -> Verdict:
        """Decide on one verify.

        Args:
            laws: K + 1 laws of the target.
            draft: K token ids, oldest first; K may be 0.
            position: tokens in the output before the first row.
            stream: the request's.
            draft_laws: what the draft tokens were drawn from; None if they were not drawn.
            judges: K + 1 laws that lossy rules judge by.
        """
        if self.name == COUPLED:
            return coupled(laws, draft, position, stream)
        if self.name == REJECTION:
            return rejection(laws, draft, position, stream, draft_laws)
        if self.name == RELAXED:
            return lossy_relaxed(
                laws, draft, position, stream, top_k=self.relaxed_top_k, delta=self.relaxed_delta, judges=judges
            )
        return lossy_typical(
            laws, draft, position, stream, epsilon=self.typical_epsilon, delta=self.typical_delta, judges=judges
        )


def rule_of(name: str, numbers: dict[str, Any]) -> AcceptRule:
    """The rule of a request; `numbers` are its options of lossy acceptors, None where they were left out.

    Raises:
        RequestError: an option of another acceptor was given, or a number is out of range.
    """
    given = {key: value for key, value in numbers.items() if value is not None}
    for key in given:
        if key not in LOSSY.get(name, ()):
            owner = next(lossy for lossy, keys in LOSSY.items() if key in keys)
            raise RequestError(
                f"{key} is {given[key]}, but the acceptor is {name!r}, which has no such number; leave it out, or use "
                f"the lossy acceptor {owner!r}."
            )
    return AcceptRule(name, **given)
