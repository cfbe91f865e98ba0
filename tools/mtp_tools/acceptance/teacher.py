"""Teacher-forced figures: at every position of a given answer, what the drafter would have proposed behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mtp_engines.engine import Choose, Floats, Ids
from mtp_runtime.api import Model
from mtp_runtime.drafters.registry import Given, make_drafter
from mtp_runtime.prepare import Prepared

TOPS = (1, 2, 3)
"""Coverage is counted among so many best tokens."""


@dataclass
class Counts:
    """What a teacher saw, by position of the draft.

    Attributes:
        reached: drafts whose earlier positions were all the teacher's.
        kept: those of them whose token is the teacher's too.
        placed: places that were scored behind the teacher's own tokens, whatever the drafter would have said before.
        within: for each of `TOPS`, those of them whose true token is among so many best ones.
    """

    reached: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    placed: list[int] = field(default_factory=list)
    within: list[list[int]] = field(default_factory=lambda: [[] for _ in TOPS])

    def add(self, drafted: Sequence[int], truth: Sequence[int], ranks: Sequence[int | None]) -> None:
        """Count one draft.

        Args:
            drafted: what was proposed; fewer than `truth` if the drafter had no more.
            truth: the teacher's tokens.
            ranks: rank of each true token behind the true ones before it, 0 for the best, None if it has none; empty
                if the drafter went its own way.
        """
        if ranks:
            for position, rank in enumerate(ranks):
                _count(self.placed, position, True)
                for top, counts in zip(TOPS, self.within, strict=True):
                    _count(counts, position, rank is not None and rank < top)
            hits = [rank == 0 for rank in ranks]
        else:
            hits = [token == true for token, true in zip(drafted, truth, strict=False)]
        for position, hit in enumerate(hits):
            _count(self.reached, position, True)
            _count(self.kept, position, hit)
            if not hit:
                break

    def merge(self, other: Counts) -> None:
        """Add those of another."""
        pairs = zip(
            (self.reached, self.kept, self.placed, *self.within),
            (other.reached, other.kept, other.placed, *other.within),
            strict=True,
        )
        for ours, theirs in pairs:
            for position, count in enumerate(theirs):
                _count(ours, position, count)


def _count(counts: list[int], position: int, number: int) -> None:
    counts.extend([0] * (position + 1 - len(counts)))
    counts[position] += number


def follow(model: Model, prepared: Prepared, answer: Sequence[int], draft_tokens: int) -> Counts:
    """Let the drafter follow prompt and answer, and draft behind every token of the answer but the last.

    As in a generation it has consumed the rows that the target committed, and knows the newest token. Where its tokens
    can be chosen from scores, it is made to draft the teacher's, so that every place is scored behind the true text;
    the chain is its own business and leaves no trace.
    """
    counts, forced = Counts(), _Forced()
    text, chunk, begin = [*prepared.prompt, *answer], model.engine.limits.prefill_chunk, len(prepared.prompt)
    sequences = model.engine.sequences()
    drafter = make_drafter(
        prepared.drafter,
        Given(prepared.prompt, sequences, model.engine, model.draft, prepared.ngram, forced.choose),
    )
    last = len(text) - 2 if len(answer) > 1 else 0
    for start in range(0, last, chunk):
        block = text[start : min(start + chunk, last)]
        verified = sequences.verify(np.array([block], np.int64), 0)
        sequences.commit(np.array([len(block)]))
        hidden, following = verified.hidden[0], np.array(text[start + 1 : start + 1 + len(block)], np.int64)
        silent = min(max(begin - 1 - start, 0), len(block))
        if silent:
            drafter.observe(following[:silent], hidden[:silent])
        for row in range(silent, len(block)):
            drafter.observe(following[row : row + 1], hidden[row : row + 1])
            newest = start + row + 1
            truth = text[newest + 1 : newest + 1 + draft_tokens]
            forced.begin(truth)
            counts.add(drafter.propose(len(truth)), truth, forced.ranks)
    return counts


class _Forced:
    """Chooses the teacher's tokens and remembers how the drafter ranked them."""

    def __init__(self) -> None:
        self._truth: Sequence[int] = ()
        self.ranks: list[int | None] = []

    def begin(self, truth: Sequence[int]) -> None:
        """The tokens of the next draft."""
        self._truth, self.ranks = truth, []

    def choose(self) -> Choose:
        """What a drafter asks for at the start of a draft."""
        return self._next

    def _next(self, logits: Floats) -> Ids:
        token = self._truth[len(self.ranks)]
        self.ranks.append(rank_of(token, logits[0]))
        return np.array([token], np.int64)


def rank_of(token: int, logits: Floats) -> int | None:
    """Tokens before this one among float32[draft_vocab_size], equal ones by id; None if it has no logit."""
    if token >= len(logits):
        return None
    own = logits[token]
    return int(np.count_nonzero(logits > own) + np.count_nonzero(logits[:token] == own))
