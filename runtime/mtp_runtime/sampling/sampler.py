"""The acceptor of a generation that samples, changes logits or reports them: laws of rows, drafts, scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from mtp_engines.engine import Choose, Floats, Ids, Verified
from mtp_engines.errors import RequestError
from mtp_runtime.constraints.matcher import TokenConstraint
from mtp_runtime.events import Completion
from mtp_runtime.sampling.accept import coupled_draft
from mtp_runtime.sampling.context import Context
from mtp_runtime.sampling.decoding import Decoding
from mtp_runtime.sampling.law import Law
from mtp_runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from mtp_runtime.sampling.stream import Stream
from mtp_runtime.sampling.transforms import Rows, law_behind
from mtp_runtime.verification import Scored


class Sampler:
    """One completion; see `mtp_runtime.acceptance.Acceptor`.

    Draft tokens are chosen by the same transforms, from the draft's own logits, by the race that the target will run
    at their positions.
    """

    needs_logits = True

    def __init__(
        self, prompt: Sequence[int], vocab_size: int, decoding: Decoding, end_tokens: Collection[int], index: int = 0
    ) -> None:
        """`decoding` is seeded; `end_tokens` are masked until the answer is long enough."""
        self._decoding, self._end_tokens, self._vocab_size = decoding, tuple(end_tokens), vocab_size
        self._options, self._rule = decoding.options, decoding.rule
        # At temperature 0 a law is one token, so a lossy rule would have nothing to judge by.
        self._judging = replace(self._options, temperature=1.0) if self._options.is_greedy else self._options
        grammar = decoding.constraint
        constraint = None if grammar is None else TokenConstraint(grammar, end_tokens, vocab_size)
        self._context = Context(prompt, vocab_size, constraint)
        seed = decoding.seed_of(index)
        # Without a seed nothing is drawn: every law is one token.
        self._stream = Stream(seed or 0)
        self._drafted: list[int] = []
        self._draft_laws: list[Law] = []
        name = "greedy" if self._options.is_greedy and not self._rule.is_lossy else self._rule.name
        self.completion = Completion(index, seed, name, self._rule.is_lossy)
        self.scores_output = decoding.logprobs is not None
        self.scores_prompt = decoding.prompt_logprobs is not None
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = (None,) if self.scores_prompt else None

    def observe_prompt(self, following: Ids, verified: Verified) -> None:
        """Score tokens of the prompt."""
        if self._decoding.prompt_logprobs is not None and self.prompt_logprobs is not None:
            self.prompt_logprobs += self._scores(following.tolist(), verified, self._decoding.prompt_logprobs)

    def accept(self, draft: Sequence[int], scored: Scored) -> list[int]:
        """By the rule of the request."""
        assert scored.logits is not None
        position = self._context.output_length
        laws, judges = (
            Rows(scored.logits, draft, self._context, options, self._end_tokens)
            for options in (self._options, self._judging)
        )
        # A draft that something else made, a lookup say, is not the one that was drawn last.
        told = self._draft_laws if self._drafted == list(draft) else None
        return self._rule.judge(laws, draft, position, self._stream, told, judges).emitted

    def emit(self, block: Sequence[int], verified: Verified) -> tuple[TokenLogprobs, ...] | None:
        """Count the tokens for the next rows, and score them if that was asked for."""
        self._context.advance(block)
        # Else a lookup that finds the same tokens later would pass for drawn.
        self._drafted, self._draft_laws = [], []
        top = self._decoding.logprobs
        return None if top is None else self._scores(block, verified, top)

    def drafting(self) -> Choose:
        """Begin a draft: what it returns makes its tokens, oldest first."""
        self._drafted, self._draft_laws = [], []
        return self._choose

    def admissible(self, draft: list[int]) -> list[int]:
        """The draft up to its first token that the constraint forbids, so that it is not verified in vain."""
        if self._context.constraint is None:
            return draft
        kept = self._context.constraint.admissible(draft)
        if self._drafted == draft:
            # What is left of a drawn draft is drawn, too.
            del self._drafted[len(kept) :], self._draft_laws[len(kept) :]
        return kept

    def draft_behind(self, logits: Floats, draft: Sequence[int]) -> int | None:
        """The token that follows a draft in another one, by float32[draft_vocab_size]; None if all are forbidden."""
        law = self._draft_law(logits, draft)
        return None if law is None else self._drawn(law, draft)

    def _choose(self, logits: Floats) -> Ids | None:
        law = self._draft_law(logits[0], self._drafted)
        if law is None:
            return None
        token = self._drawn(law, self._drafted)
        self._drafted.append(token)
        self._draft_laws.append(law)
        return np.array([token])

    def _draft_law(self, logits: Floats, draft: Sequence[int]) -> Law | None:
        row = logits
        if len(row) < self._vocab_size:
            row = np.full(self._vocab_size, -np.inf, np.float32)
            row[: len(logits)] = logits
        try:
            return law_behind(row, draft, self._context, self._options, self._end_tokens)
        except RequestError:
            # Every token that the draft can say is masked. The target may well have others.
            return None if self._context.constraint is not None else Law.point(int(row.argmax()))

    def _drawn(self, law: Law, draft: Sequence[int]) -> int:
        return coupled_draft(law, self._stream, self._context.output_length + len(draft))

    def _scores(self, tokens: Sequence[int], verified: Verified, top: int) -> tuple[TokenLogprobs, ...]:
        """Of each token by its row; the rows of a verify begin with that of the first one."""
        assert verified.logits is not None
        return tuple(token_logprobs(verified.logits[0, row], token, top) for row, token in enumerate(tokens))
