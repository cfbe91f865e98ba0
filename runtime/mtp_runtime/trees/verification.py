"""All paths of a tree are verified in one run; the one that goes furthest is committed, for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtp_engines.engine import Ids, SlotSequences, Verified
from mtp_engines.errors import NumericsError
from mtp_runtime.acceptance import Acceptor
from mtp_runtime.sampling.logprobs import TokenLogprobs
from mtp_runtime.stats import Stats
from mtp_runtime.trees.branching import Branching
from mtp_runtime.verification import Scored, verify_of


class PathAcceptor:
    """Another acceptor, asked of several drafts in the place of one; it must not depend on how a draft was made."""

    def __init__(self, inner: Acceptor) -> None:
        self._inner = inner
        self.needs_logits, self.scores_prompt = inner.needs_logits, inner.scores_prompt
        self.scores_output, self.completion = inner.scores_output, inner.completion
        self._judged: tuple[Scored, list[int]] | None = None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Passed on."""
        return self._inner.prompt_logprobs

    def observe_prompt(self, following: Ids, verified: Verified) -> None:
        """Passed on."""
        self._inner.observe_prompt(following, verified)

    def furthest(self, drafts: Sequence[list[int]], scored: Sequence[Scored]) -> int:
        """The draft of which the most is accepted; of several the first.

        A row behind the same tokens says the same in every path. So what the target says behind the drafts that were
        judged goes for all, and only one that has all of that, the bonus token too, can be accepted further.
        """
        winner, emitted = 0, self._inner.accept(drafts[0], scored[0])
        for path, draft in enumerate(drafts[1:], 1):
            if draft[: len(emitted)] == emitted:
                winner, emitted = path, self._inner.accept(draft, scored[path])
        self._judged = scored[winner], emitted
        return winner

    def accept(self, draft: Sequence[int], scored: Scored) -> list[int]:
        """What `furthest` has found of its winner is not judged again."""
        if self._judged is not None and self._judged[0] is scored:
            return self._judged[1]
        return self._inner.accept(draft, scored)

    def emit(self, block: Sequence[int], verified: Verified) -> tuple[TokenLogprobs, ...] | None:
        """Passed on."""
        self._judged = None
        return self._inner.emit(block, verified)


class TreeVerification:
    """See `mtp_runtime.verification.Verification`: the draft that is left is that of the path that was best."""

    def __init__(self, every: SlotSequences, branching: Branching, acceptor: PathAcceptor, stats: Stats) -> None:
        """`every` has one sequence for each path of `branching`; `stats` learns which cycles a branch won."""
        self._every, self._first, self._branching = every, every.window(0, 1), branching
        self._acceptor, self._stats = acceptor, stats
        self._verify, self._verify_first = (
            verify_of(each, logits=acceptor.needs_logits) for each in (every, self._first)
        )
        self._verified: Verified | None = None
        self._winner: int | None = None

    def begin(self, pending: int, draft: list[int]) -> tuple[list[int], Scored]:
        """Run all rows of all paths; only the pending one, in the first path, without a draft.

        Also where a draft makes no numbers, as in `RowsTogether`.
        """
        if draft:
            drafts = self._branching.drafts
            width = 1 + max(map(len, drafts))
            tokens: Ids = np.full((len(drafts), width), pending, np.int64)
            for path, row in enumerate(drafts):
                tokens[path, 1 : len(row) + 1] = row
            try:
                self._verified = self._verify(tokens, width)
            except NumericsError:
                draft = []
            else:
                scored = [_scored(self._verified, path, len(row) + 1) for path, row in enumerate(drafts)]
                self._winner = winner = self._acceptor.furthest(drafts, scored)
                return drafts[winner], scored[winner]
        self._verified, self._winner = self._verify_first(np.array([[pending]]), 1), None
        return draft, _scored(self._verified, 0, 1)

    def commit(self, count: int) -> Verified:
        """Keep the first rows of the best path, in all of them."""
        assert self._verified is not None, "commit comes after begin"
        if self._winner is None:
            self._first.commit(np.array([count]))
            return self._verified
        before, paths = int(self._every.lengths[0]), len(self._every.lengths)
        # The others keep as many: where that is all of them, no recurrence is run again. Then they are written over.
        self._every.commit(np.full(paths, count))
        for path in range(paths):
            if path != self._winner:
                self._every.copy(self._winner, path, before)
        self._stats.rescued += self._winner > 0
        only = slice(self._winner, self._winner + 1)
        logits = None if self._verified.logits is None else self._verified.logits[only]
        return Verified(self._verified.ids[only], self._verified.hidden[only], logits)


def _scored(verified: Verified, path: int, rows: int) -> Scored:
    logits = None if verified.logits is None else list(verified.logits[path, :rows])
    return Scored(verified.ids[path, :rows].tolist(), logits)
