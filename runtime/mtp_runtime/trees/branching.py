"""Which tokens the paths of a tree draft take."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mtp_engines.engine import Choose, Floats, Ids

BRANCHES = 2
"""The most branches. Behind the second place a rescue comes too seldom for the rows that it costs."""

Behind = Callable[[npt.NDArray[np.float32], Sequence[int]], int | None]
"""float32[draft_vocab_size], logits of a place, and the draft before it -> the token there, None if there is none."""


class Branching:
    """Chooses the tokens of all paths of a draft.

    Path 0 is the chain, which is drafted as ever. Path p shares its first p - 1 places and takes the next best token at
    place p - 1; after that it goes on as a chain does.
    """

    def __init__(self, branches: int, behind: Behind | None = None) -> None:
        """`branches` is 1 to `BRANCHES`; `behind` chooses a token, None takes the best one."""
        self.count = branches + 1
        """How many paths there are."""
        self.drafts: list[list[int]] = [[] for _ in range(self.count)]
        """The newest draft of every path; one that found no token is shorter than the chain."""
        self._behind = behind or best

    def begin(self) -> Choose:
        """Begin a draft: what it returns makes the tokens of all paths at one place, oldest first."""
        self.drafts = [[] for _ in range(self.count)]
        return self._choose

    def _choose(self, logits: Floats) -> Ids | None:
        place, rest = len(self.drafts[0]), self.drafts[1:]
        first = self._behind(logits[0], self.drafts[0])
        if first is None:
            return None
        # What is chosen for a path that has ended is not looked at.
        chosen: Ids = np.full(self.count, first, np.int64)
        for path, draft in enumerate(rest, 1):
            branch = path - 1
            if len(draft) < place:
                continue
            if place >= branch:
                row = _without(logits[path], first) if place == branch else logits[path]
                token = self._behind(row, draft)
                if token is None:
                    continue
                chosen[path] = token
            draft.append(int(chosen[path]))
        self.drafts[0].append(first)
        return chosen


def best(logits: npt.NDArray[np.float32], draft: Sequence[int]) -> int:
    """The best token, whatever was drafted before it."""
    return int(logits.argmax())


def _without(logits: npt.NDArray[np.float32], token: int) -> npt.NDArray[np.float32]:
    row = logits.copy()
    row[token] = -np.inf
    return row
