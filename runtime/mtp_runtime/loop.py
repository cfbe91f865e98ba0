"""The algorithm: prefill, then draft, verify, accept, commit, emit until something ends it.

`Generation` has the steps of one answer and takes them in turn when it is iterated. Where the backend does a whole
cycle by itself, the loop only chooses K and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mtp_engines.engine import CycleSequences, Ids, Sequences, Verified
from mtp_runtime.acceptance import Acceptor, GreedyAcceptor
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.ending import Ending
from mtp_runtime.events import Emitted, Event, Finished, FinishReason
from mtp_runtime.policy import DraftPolicy
from mtp_runtime.sampling.logprobs import TokenLogprobs
from mtp_runtime.stats import Stats
from mtp_runtime.verification import Scored, Verification, verify_of


@dataclass(frozen=True)
class WholeCycles:
    """Sequences whose backend drafts with the bundle's head, or not at all, and accepts greedily."""

    sequences: CycleSequences
    drafting: bool


@dataclass(frozen=True)
class Parts:
    """What one generation works with."""

    prefill: Sequences
    """The sequences as the prompt sees them; apart, so that its time can be counted apart."""
    verification: Verification
    drafter: Drafter
    policy: DraftPolicy
    ending: Ending
    stats: Stats
    prefill_chunk: int
    cycles: WholeCycles | None = None
    """The backend's own cycles, where they do what this generation wants."""
    acceptor: Acceptor = field(default_factory=GreedyAcceptor)
    new_drafter: Callable[[], Drafter] | None = None
    """Makes a drafter like this one that has seen nothing; None where the generation never begins again."""


@dataclass(frozen=True)
class Block:
    """What is emitted at once, and its log-probabilities if they were asked for."""

    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...] | None = None


class Generation:
    """One answer in the making.

    Tokens are emitted after their rows are committed. Between cycles the target has consumed every token but the
    newest, `pending`; an exception in a cycle leaves the committed state as it was.
    """

    def __init__(self, prompt: Sequence[int], parts: Parts) -> None:
        """Nothing has run yet."""
        self.prompt, self.parts = tuple(prompt), parts
        self.emitted: list[int] = []
        self._scores: list[TokenLogprobs] = []
        self.cached = 0
        """Tokens of the prompt whose state was taken from another answer, of an earlier request as a rule."""
        self.stops_short = 0
        """A last chunk of more rows than this leaves one token for a run of its own; 0: none does.

        What is there before that token can be kept for the same text, of which one token has to run in any case.
        """
        self._consumed, self._wanted = 0, self.prompt

    @property
    def text(self) -> tuple[int, ...]:
        """What the target has consumed between cycles: the prompt and what was emitted, but for the newest token."""
        return self.prompt + tuple(self.emitted[:-1])

    @property
    def pending(self) -> int:
        """The newest token."""
        return self.emitted[-1]

    @property
    def room(self) -> int:
        """Tokens that may still be emitted."""
        return self.parts.ending.remaining(len(self.emitted))

    @property
    def prefilled(self) -> bool:
        """Whether the text needs no further chunk; it needs none at all where nothing may be emitted or scored."""
        wanted = self.room > 0 or self.parts.acceptor.scores_prompt
        return not wanted or self._consumed == len(self._wanted)

    @property
    def done(self) -> bool:
        """Whether nothing more is to be emitted."""
        return self.prefilled and (self.parts.ending.reason is not None or self.room <= 0)

    def __iter__(self) -> Iterator[Event]:
        """Run to the end: `Emitted` for the prompt and for each cycle, then `Finished`."""
        while not self.prefilled:
            if (first := self.prefill()) is not None:
                yield first
        while not self.done:
            yield self.cycle()
        yield from self.close()

    def restart(self) -> Drafter:
        """Begin again on sequences that were reset, with what was emitted; a drafter that has seen nothing of it."""
        self._consumed, self._wanted = 0, self.text
        return self.parts.drafter if self.parts.new_drafter is None else self.parts.new_drafter()

    def resume(self, length: int) -> None:
        """The sequences already hold the state behind the first tokens of the text, and the drafter saw them."""
        self._consumed = length
        if not self.emitted:
            self.cached = length

    def prefill(self) -> Emitted | None:
        """Consume a chunk of the prompt; what is emitted after the last one. Of a restarted text, nothing is."""
        parts = self.parts
        if parts.cycles is not None:
            first = parts.cycles.sequences.prefill(np.array([self._wanted], np.int64), drafting=parts.cycles.drafting)
            self._consumed = len(self._wanted)
            return self._emit(Block(parts.ending.cut([int(first[0])])))
        acceptor, start, is_new = parts.acceptor, self._consumed, not self.emitted
        end = min(start + parts.prefill_chunk, len(self._wanted))
        if 0 < self.stops_short < end - start and end == len(self._wanted):
            end -= 1
        is_last = end == len(self._wanted)
        rows = end - start if acceptor.scores_prompt else int(is_last)
        tokens: Ids = np.array([self._wanted[start:end]], np.int64)
        verify = verify_of(parts.prefill, logits=acceptor.needs_logits and is_new)
        verified = verify(tokens, rows if is_new else 0)
        parts.prefill.commit(np.array([end - start]))
        self._consumed = end
        following: Ids = np.array(self._wanted[start + 1 : end + 1], np.int64)
        block: list[int] = []
        if is_new:
            acceptor.observe_prompt(following, verified)
        if is_last:
            block = acceptor.accept([], Scored.last_of(verified, 1)) if is_new else [self.pending]
            following = np.append(following, block)
        parts.drafter.observe(following, verified.hidden[0])
        if not is_last or not is_new or self.room <= 0:
            return None
        last = replace(verified, logits=None if verified.logits is None else verified.logits[:, -1:])
        scores = acceptor.emit(block, last)
        return self._emit(Block(parts.ending.cut(block), scores))

    def asked(self) -> int:
        """K of the next cycle, no more than may be emitted."""
        return min(self.parts.policy.choose(self.parts.stats.cycles), self.room - 1)

    def cycle(self) -> Emitted:
        """A whole cycle."""
        parts = self.parts
        if parts.cycles is not None:
            chosen, room = parts.policy.choose(parts.stats.cycles), self.room
            # Always the whole K, since a captured cycle has one; what is more than may be emitted is dropped.
            cycle = parts.cycles.sequences.cycle(chosen)
            block = Block(parts.ending.cut(cycle.emitted[0][:room]))
            return self._count(cycle.draft[0][: room - 1], block, min(chosen, room - 1))
        asked = self.asked()
        draft, scored = parts.verification.begin(self.pending, parts.drafter.propose(asked))
        block_ids = self.accept(draft, scored)
        # The rows of the pending token and of every emitted one but the last have been consumed.
        return self.finish(draft, block_ids, parts.verification.commit(len(block_ids)), asked)

    def accept(self, draft: list[int], scored: Scored) -> list[int]:
        """The accepted draft tokens and the bonus token, up to where the answer ends."""
        return self.parts.ending.cut(self.parts.acceptor.accept(draft, scored))

    def finish(self, draft: list[int], block: list[int], verified: Verified, asked: int) -> Emitted:
        """Emit a block whose rows were committed.

        Args:
            draft: what was proposed.
            block: what `accept` made of it.
            verified: one sequence, whose rows begin with that of the pending token.
            asked: K of the cycle.
        """
        self.parts.drafter.observe(np.array(block), verified.hidden[0, : len(block)])
        return self._count(draft, Block(block, self.parts.acceptor.emit(block, verified)), asked)

    def close(self, given_up: FinishReason | None = None) -> Iterator[Event]:
        """What is left to say once it is done, or why it was given up before: then no half character is shown."""
        parts, done = self.parts, self.parts.acceptor.completion
        text = parts.ending.text
        if rest := text.finish() if given_up is None else text.flush():
            yield Emitted((), rest, () if parts.acceptor.scores_output else None, done.index)
        yield Finished(
            tuple(self.emitted),
            parts.ending.full_text,
            given_up or parts.ending.reason or "length",
            len(self.prompt),
            parts.stats,
            done,
            tuple(self._scores) if parts.acceptor.scores_output else None,
            parts.acceptor.prompt_logprobs,
            parts.ending.constraint,
            self.cached,
        )

    def _count(self, draft: list[int], block: Block, asked: int) -> Emitted:
        accepted = _delivered(draft, block.tokens)
        self.parts.policy.observe(len(draft), accepted)
        self.parts.stats.add_cycle(len(draft), accepted, len(block.tokens), self.parts.drafter.source, asked)
        return self._emit(block, accepted)

    def _emit(self, block: Block, accepted: int = 0) -> Emitted:
        self.emitted.extend(block.tokens)
        self._scores.extend(block.logprobs or ())
        text, index = self.parts.ending.text.take(), self.parts.acceptor.completion.index
        drafted = tuple(place < accepted for place in range(len(block.tokens)))
        return Emitted(tuple(block.tokens), text, block.logprobs, index, drafted)


def _delivered(draft: list[int], block: list[int]) -> int:
    """How many draft tokens are in the block: all but the bonus token, or all if an end cut it off."""
    kept = 0
    while kept < min(len(draft), len(block)) and draft[kept] == block[kept]:
        kept += 1
    return kept
