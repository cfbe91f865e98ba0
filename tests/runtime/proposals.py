"""What a drafter should have proposed, computed apart from it, and a way to hear what it did propose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtp_engines.engine import Floats, Ids, Sequences, Verified
from mtp_engines.errors import RequestError
from mtp_runtime import Model
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.drafters.registry import Given, make_drafter
from tests.runtime.parts import Delegate, Run, play

Expected = Callable[[list[int], int], list[int]]
"""Text and number of draft tokens -> what is to be proposed."""


class Heard:
    """Passes everything on and keeps each proposal with the text that it was made for."""

    def __init__(self, inner: Drafter, prompt: Sequence[int]) -> None:
        self._inner, self._text = inner, list(prompt[:1])
        self.proposals: list[tuple[list[int], int, list[int]]] = []

    @property
    def source(self) -> str:
        return self._inner.source

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        self._text += tokens.tolist()
        self._inner.observe(tokens, hidden)

    def propose(self, draft_tokens: int) -> list[int]:
        draft = self._inner.propose(draft_tokens)
        self.proposals.append((list(self._text), draft_tokens, draft))
        return draft

    def differ_from(self, expected: Expected) -> list[tuple[list[int], list[int]]]:
        """Proposals beside what they should have been, where that is something else."""
        asked = [(draft, expected(text, count)) for text, count, draft in self.proposals]
        return [(found, wanted) for found, wanted in asked if found != wanted]


def heard(
    model: Model, name: str, prompt: list[int], limit: int, draft_tokens: int, ngram: tuple[int, int] = (2, 4)
) -> tuple[Run, Heard]:
    """Generate with the drafter of this name, as a request would, and hear it."""
    sequences = model.engine.sequences()
    drafter = make_drafter(name, Given(prompt, sequences, model.engine, model.draft, ngram))
    listener = Heard(drafter, prompt)
    return play(model, prompt, limit, draft_tokens, listener, sequences=sequences), listener


def said_by(alone: Model) -> Expected:
    """What a bundle says itself after a text, greedily, plain and past any end token; nothing where it has no room."""

    def expected(text: list[int], count: int) -> list[int]:
        try:
            done = alone.complete(prompt_ids=text, max_new_tokens=count, draft_tokens=0, ignore_eos=True)
        except RequestError:
            return []
        return list(done.token_ids)

    return expected


def looked_up(text: list[int], count: int, shortest: int = 2, longest: int = 4) -> list[int]:
    """What followed the newest earlier occurrence of the longest repeated ending, found by search from the back."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[-length:]:
                return text[start + length : start + length + count]
    return []


class CommitsDrafts(Delegate):
    """A deliberate fault: what was staged when the next verify comes is kept, drafts too."""

    claims = False
    """Whether the length counts the kept drafts; if not, a recurrent state alone shows them."""

    def __init__(self, inner: Sequences) -> None:
        super().__init__(inner)
        self._staged = 0

    def verify(self, tokens: Ids, logit_rows: int) -> Verified:
        if self._staged:
            self.inner.commit(self.lengths * 0 + self._staged)
            if not self.claims:
                self.inner.lengths -= self._staged
        self._staged = tokens.shape[1]
        return super().verify(tokens, logit_rows)

    def commit(self, rows: Ids) -> None:
        self._staged = 0
        super().commit(rows)


class CountsDrafts(CommitsDrafts):
    """The same with the kept drafts in the length."""

    claims = True
