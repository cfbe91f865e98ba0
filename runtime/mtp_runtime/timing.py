"""Clocks around the seams of the loop; the loop itself knows of none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from mtp_engines.engine import Choose, Cycle, CycleSequences, Floats, Ids, Saved, Sequences, SlotSequences, Verified
from mtp_runtime.acceptance import Acceptor
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.sampling.logprobs import TokenLogprobs
from mtp_runtime.stats import Seconds
from mtp_runtime.verification import Scored

Clock = Callable[[], float]


class TimedSequences:
    """Sequences that add the time of verify and commit to two named parts of the statistics."""

    def __init__(
        self,
        inner: Sequences,
        seconds: Seconds,
        parts: tuple[str, str] = ("verify", "commit"),
        clock: Clock = time.perf_counter,
    ) -> None:
        self._inner, self._seconds, self._parts, self._clock = inner, seconds, parts, clock
        self.lengths = inner.lengths

    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Timed under the first part."""
        verify = partial(self._inner.verify, logits=True) if logits else self._inner.verify
        with timed(self._seconds, self._parts[0], self._clock):
            return verify(tokens, logit_rows)

    def commit(self, rows: Ids) -> None:
        """Timed under the second part."""
        with timed(self._seconds, self._parts[1], self._clock):
            self._inner.commit(rows)

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """Passed on: the drafter that asks for it is timed."""
        draft = self._inner.draft if choose is None else partial(self._inner.draft, choose=choose)
        return draft(tokens, hidden, rows, draft_tokens)

    def logits(self, hidden: Floats) -> Floats:
        """Passed on."""
        return self._inner.logits(hidden)

    def snapshot(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Passed on."""
        return self._inner.snapshot(sequence)

    def reset(self) -> None:
        """Passed on."""
        self._inner.reset()


class TimedCycles(TimedSequences):
    """Sequences with cycles of their own, in which nobody can tell draft from verify: all of it counts as verify."""

    def __init__(self, inner: CycleSequences, seconds: Seconds, clock: Clock = time.perf_counter) -> None:
        super().__init__(inner, seconds, clock=clock)
        self._cycles = inner

    def prefill(self, tokens: Ids, *, drafting: bool) -> Ids:
        """Timed under prefill."""
        with timed(self._seconds, "prefill", self._clock):
            return self._cycles.prefill(tokens, drafting=drafting)

    def cycle(self, draft_tokens: int) -> Cycle:
        """Timed under verify."""
        with timed(self._seconds, "verify", self._clock):
            return self._cycles.cycle(draft_tokens)


class TimedSlots(TimedSequences):
    """Sequences that run in parts; copying one to another counts as commit."""

    def __init__(self, inner: SlotSequences, seconds: Seconds, clock: Clock = time.perf_counter) -> None:
        super().__init__(inner, seconds, clock=clock)
        self._slots = inner

    def window(self, start: int, count: int) -> SlotSequences:
        """Timed in the same way."""
        return TimedSlots(self._slots.window(start, count), self._seconds, self._clock)

    def save(self, sequence: int, since: int = 0) -> Saved:
        """Passed on."""
        return self._slots.save(sequence, since)

    def restore(self, sequence: int, parts: Iterable[Saved]) -> None:
        """Passed on."""
        self._slots.restore(sequence, parts)

    def copy(self, source: int, target: int, since: int = 0) -> None:
        """Timed under commit."""
        with timed(self._seconds, "commit", self._clock):
            self._slots.copy(source, target, since)


class TimedDrafter:
    """A drafter whose work counts as draft."""

    def __init__(self, inner: Drafter, seconds: Seconds, clock: Clock = time.perf_counter) -> None:
        self._inner, self._seconds, self._clock = inner, seconds, clock

    @property
    def source(self) -> str:
        """Passed on."""
        return self._inner.source

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Timed: a long prompt is consumed here."""
        with timed(self._seconds, "draft", self._clock):
            self._inner.observe(tokens, hidden)

    def propose(self, draft_tokens: int) -> list[int]:
        """Timed."""
        with timed(self._seconds, "draft", self._clock):
            return self._inner.propose(draft_tokens)


class TimedAcceptor:
    """An acceptor whose work counts as accept."""

    def __init__(self, inner: Acceptor, seconds: Seconds, clock: Clock = time.perf_counter) -> None:
        self._inner, self._seconds, self._clock = inner, seconds, clock
        self.needs_logits, self.scores_prompt = inner.needs_logits, inner.scores_prompt
        self.scores_output, self.completion = inner.scores_output, inner.completion

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Passed on."""
        return self._inner.prompt_logprobs

    def observe_prompt(self, following: Ids, verified: Verified) -> None:
        """Timed."""
        with timed(self._seconds, "accept", self._clock):
            self._inner.observe_prompt(following, verified)

    def accept(self, draft: Sequence[int], scored: Scored) -> list[int]:
        """Timed."""
        with timed(self._seconds, "accept", self._clock):
            return self._inner.accept(draft, scored)

    def emit(self, block: Sequence[int], verified: Verified) -> tuple[TokenLogprobs, ...] | None:
        """Timed."""
        with timed(self._seconds, "accept", self._clock):
            return self._inner.emit(block, verified)


class timed:  # noqa: N801 - it is used as a verb
    """Adds the time of a block to one part, however the block ends, less what it added to other parts itself.

    It stands around every call of a cycle, where a context manager made of a generator took three times as long.
    """

    __slots__ = ("_before", "_clock", "_part", "_seconds", "_start")

    def __init__(self, seconds: Seconds, part: str, clock: Clock) -> None:
        self._seconds, self._part, self._clock = seconds, part, clock

    def __enter__(self) -> None:
        self._before, self._start = self._seconds.total, self._clock()

    def __exit__(self, *error: object) -> None:
        seconds, part = self._seconds, self._part
        spent = self._clock() - self._start - (seconds.total - self._before)
        setattr(seconds, part, getattr(seconds, part) + spent)
