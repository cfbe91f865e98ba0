"""Drafts whose acceptance is chosen, while the head still runs so that its time counts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from mtp_engines.engine import Floats, Ids
from mtp_runtime.drafters.protocol import Drafter
from mtp_tools.verify.forced import ForcedDrafter

_DECK = 10
"""Outcomes that are shuffled together, so that a short run keeps to the share too."""


class ForcedHead:
    """Lets the bundle's head draft, throws its tokens away and proposes others in their place."""

    source = "forced"

    def __init__(self, head: Drafter, forced: ForcedDrafter) -> None:
        self._head, self._forced = head, forced

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Both need to know."""
        self._head.observe(tokens, hidden)
        self._forced.observe(tokens, hidden)

    def propose(self, draft_tokens: int) -> list[int]:
        """As many as the head proposed."""
        return self._forced.propose(len(self._head.propose(draft_tokens)))


class Script:
    """How many drafts of each cycle are right: a `Pattern` of forced drafts.

    Of the drafts of a position that is reached, which means that those before it are right, the share `acceptance`
    is right, in an order that the seed decides. After n of them the count is at most one off n times the share at
    the end of every ten, whatever the seed.
    """

    def __init__(self, acceptance: float, seed: int) -> None:
        self._acceptance, self._generator = acceptance, random.Random(seed)
        self._decks: dict[int, list[bool]] = {}
        self._dealt: dict[int, int] = {}

    def __call__(self, cycle: int, draft_tokens: int) -> int:
        """Right drafts of the next cycle; to be asked once for each."""
        right = 0
        while right < draft_tokens and self._next(right):
            right += 1
        return right

    def _next(self, position: int) -> bool:
        deck = self._decks.setdefault(position, [])
        if not deck:
            dealt = self._dealt.get(position, 0)
            share = math.floor((dealt + 1) * _DECK * self._acceptance + 0.5)
            share -= math.floor(dealt * _DECK * self._acceptance + 0.5)
            deck += [index < share for index in range(_DECK)]
            self._generator.shuffle(deck)
            self._dealt[position] = dealt + 1
        return deck.pop()


def forced_head(
    head: Drafter, prompt_tokens: int, continuation: Sequence[int], vocab_size: int, acceptance: float, seed: int
) -> ForcedHead:
    """A head whose drafts are the plain continuation, but for the wrong ones that the acceptance asks for."""
    return ForcedHead(head, ForcedDrafter(prompt_tokens, continuation, vocab_size, Script(acceptance, seed)))
