"""Drafters, sequences and runs that the tests of the runtime put in the place of the product's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtp_engines.engine import Floats, Ids, Sequences, Verified
from mtp_runtime import Emitted, Event, Finished, Model
from mtp_runtime.drafters.none import NoDrafter
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.ending import Ending
from mtp_runtime.policy import DraftPolicy, FixedPolicy
from mtp_runtime.text import TextStream
from mtp_tools.verify.digests import Digests, state_digests


@dataclass(frozen=True)
class Run:
    """One generation, event by event.

    blocks: ids of the prefill and of every cycle. texts: text of every event. states: committed
    length -> digests of the states, where they were asked for.
    """

    blocks: list[tuple[int, ...]]
    texts: list[str]
    finished: Finished
    states: dict[int, Digests]

    @property
    def ids(self) -> list[int]:
        return list(self.finished.token_ids)

    @property
    def accepted(self) -> list[int]:
        """Accepted drafts of every cycle; of a cut last cycle, one too few."""
        return [len(block) - 1 for block in self.blocks[1:]]


def collect(events: Iterable[Event], look: Sequences | None = None) -> Run:
    """Drain a generation; with `look`, its committed states after every event with ids."""
    blocks, texts, states = [], [], {}
    for event in events:
        if isinstance(event, Finished):
            return Run(blocks, texts, event, states)
        texts.append(event.text)
        if event.token_ids:
            blocks.append(event.token_ids)
            if look is not None:
                states[int(look.lengths[0])] = state_digests(look)
    raise AssertionError("a generation ends with Finished")


def streamed(model: Model, **options: Any) -> Run:
    """Generate event by event, and show that the result is the one that is not streamed."""
    run = collect(model.generate(**options))
    whole = model.complete(**options)
    assert [token for block in run.blocks for token in block] == run.ids
    assert "".join(run.texts) == run.finished.text
    assert (whole.token_ids, whole.text, whole.finish_reason) == (
        run.finished.token_ids,
        run.finished.text,
        run.finished.finish_reason,
    )
    assert counts(whole) == counts(run.finished)
    return run


def counts(finished: Finished) -> dict[str, Any]:
    """The statistics without the times."""
    return {name: value for name, value in finished.stats.as_dict().items() if name != "seconds"}


def play(
    model: Model,
    prompt: Sequence[int],
    limit: int,
    draft_tokens: int | DraftPolicy = 0,
    drafter: Drafter | str = "own",
    *,
    wrap: Callable[[Sequences], Any] | None = None,
    sequences: Sequences | None = None,
    ending: Ending | None = None,
    states: bool = False,
) -> Run:
    """Generate with parts of the test's choice.

    drafter: "own" is the bundle's head. wrap: goes between loop and engine. sequences: continues
        these instead of opening new ones. ending: instead of the limit alone.
    """
    inner = model.engine.sequences() if sequences is None else sequences
    used = wrap(inner) if wrap else inner
    policy = FixedPolicy(draft_tokens) if isinstance(draft_tokens, int) else draft_tokens
    chosen = model.drafter(used) if isinstance(drafter, str) else drafter
    events = model.run(list(prompt), used, chosen, policy, ending or limit_only(limit))
    return collect(events, inner if states else None)


def plain(model: Model, prompt: Sequence[int], limit: int, *, states: bool = False) -> Run:
    """Plain decoding."""
    return play(model, prompt, limit, 0, NoDrafter(), states=states)


def limit_only(limit: int, ends: Collection[int] = ()) -> Ending:
    """An ending without text."""
    return Ending(limit, ends, TextStream(None, ()))


class Scripted:
    """Proposes a known continuation, wrong wherever wrong(cycle, index, draft_tokens) says so."""

    source = "scripted"

    def __init__(
        self, prompt: Sequence[int], continuation: Sequence[int], size: int, wrong: Callable[[int, int, int], bool]
    ) -> None:
        self._continuation, self._size, self._wrong = continuation, size, wrong
        self._emitted, self._cycle = 1 - len(prompt), 0

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        self._emitted += len(tokens)

    def propose(self, draft_tokens: int) -> list[int]:
        truth = self._continuation[self._emitted : self._emitted + draft_tokens]
        cycle, self._cycle = self._cycle, self._cycle + 1
        return [
            (token + 1) % self._size if self._wrong(cycle, index, len(truth)) else token
            for index, token in enumerate(truth)
        ]


def forced(run: Run, prompt: Sequence[int], size: int, accepted: Callable[[int, int], int]) -> Scripted:
    """A drafter of which accepted(cycle, draft_tokens) tokens are right, then one that is wrong."""
    return Scripted(prompt, run.ids, size, lambda cycle, index, k: index >= accepted(cycle, k))


class Delegate:
    """Sequences that hand everything on; the base of recorders and of deliberate faults."""

    def __init__(self, inner: Sequences) -> None:
        self.inner, self.lengths = inner, inner.lengths

    def verify(self, tokens: Ids, logit_rows: int, **options: Any) -> Verified:
        return self.inner.verify(tokens, logit_rows, **options)

    def commit(self, rows: Ids) -> None:
        self.inner.commit(rows)

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, **options: Any) -> Ids:
        return self.inner.draft(tokens, hidden, rows, draft_tokens, **options)

    def logits(self, hidden: Floats) -> Floats:
        return self.inner.logits(hidden)

    def snapshot(self, sequence: int) -> dict[str, Any]:
        return self.inner.snapshot(sequence)

    def reset(self) -> None:
        self.inner.reset()


class Recorder(Delegate):
    """Remembers every draft and how many rows every verify had."""

    def __init__(self, inner: Sequences) -> None:
        super().__init__(inner)
        self.drafts: list[list[int]] = []
        self.draft_calls = 0
        self.verified_rows: list[int] = []

    def verify(self, tokens: Ids, logit_rows: int) -> Verified:
        self.verified_rows.append(tokens.shape[1])
        return super().verify(tokens, logit_rows)

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int) -> Ids:
        self.draft_calls += 1
        ids = super().draft(tokens, hidden, rows, draft_tokens)
        if draft_tokens:
            self.drafts.append(ids[0].tolist())
        return ids


def recorded(model: Model, prompt: Sequence[int], limit: int, **options: Any) -> tuple[Run, Recorder]:
    """Generate with a recorder between loop and engine; options: of `play`."""
    recorder = Recorder(options.pop("sequences", None) or model.engine.sequences())
    return play(model, prompt, limit, wrap=lambda inner: recorder, sequences=recorder.inner, **options), recorder


class CommitsRejected(Delegate):
    """A deliberate fault: the recurrence runs over every staged row, then the accepted length is claimed."""

    def verify(self, tokens: Ids, logit_rows: int) -> Verified:
        self._rows = tokens.shape[1]
        return super().verify(tokens, logit_rows)

    def commit(self, rows: Ids) -> None:
        self.inner.commit(np.full_like(rows, self._rows))
        self.inner.lengths -= self._rows - rows


def emitted_ids(events: Iterable[Event], most: int) -> list[int]:
    """The first ids of a generation, until at least `most` are out."""
    ids: list[int] = []
    for event in events:
        if isinstance(event, Emitted):
            ids += event.token_ids
        if len(ids) >= most:
            break
    return ids


def take_into(ids: list[int], events: Iterable[Event]) -> None:
    """Append what is emitted, so that it is still there when the generation raises."""
    for event in events:
        if isinstance(event, Emitted):
            ids += event.token_ids
