"""Tokens of a batch of drafts, each by the rule of its own request."""

from __future__ import annotations

import numpy as np

from mtp_engines.engine import Floats, Ids
from mtp_runtime.batching.calls import Draft


class Chosen:
    """Chooses for every sequence of a batch by its own rule; see `mtp_engines.engine.Choose`."""

    def __init__(self, calls: dict[int, Draft]) -> None:
        """`calls` by their place in the batch."""
        self._calls, self._depth = calls, 0
        self.ends: dict[int, int | Exception] = {}
        """Places whose draft has ended: after how many tokens, or by what failure."""

    def __call__(self, logits: Floats) -> Ids | None:
        """The best token of rows that have no rule or have ended."""
        ids: Ids = np.argmax(logits, axis=-1)
        for place, call in self._calls.items():
            if place in self.ends or call.choose is None:
                continue
            if self._depth == call.draft_tokens:
                self.ends[place] = self._depth
                continue
            try:
                chosen = call.choose(logits[place : place + 1])
            except Exception as error:  # One request's rule; the others go on.
                self.ends[place] = error
                continue
            if chosen is None:
                self.ends[place] = self._depth
            else:
                ids[place] = chosen[0]
        self._depth += 1
        return None if len(self.ends) == len(self._calls) else ids
