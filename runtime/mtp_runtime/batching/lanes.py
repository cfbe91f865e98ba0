"""One answer of a ticket: it waits, runs in a slot, may have to leave it and come again, and ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from mtp_engines.engine import SlotSequences
from mtp_runtime.batching.calls import SlotProxy, Turn, ask
from mtp_runtime.batching.feeding import LateDrafter
from mtp_runtime.batching.prefixes import Place, PrefixCache
from mtp_runtime.batching.tasks import Task
from mtp_runtime.batching.tickets import Ticket
from mtp_runtime.drafters.failsafe import FailSafeDrafter
from mtp_runtime.events import Completion, Event, Finished, FinishReason
from mtp_runtime.loop import Generation
from mtp_runtime.stats import Stats

Deliver = Callable[["Lane", Event], None]
Report = Callable[[Exception], None]


class Lane:
    """One answer.

    Attributes:
        ticket: the request that it belongs to.
        index: which of its answers.
        order: when it came; of equal priority the earliest goes first.
        task: what runs; None while it waits.
        generation: None before it has run.
        degraded: its drafter failed.
        restarted: it had to leave a slot.
    """

    def __init__(self, ticket: Ticket, index: int, order: int, deliver: Deliver) -> None:
        """It waits; `deliver` is told of its events."""
        self.ticket, self.index, self.order, self.deliver = ticket, index, order, deliver
        self.task: Task | None = None
        self.generation: Generation | None = None
        self.proxy: SlotProxy | None = None
        self.degraded = False
        self.restarted = False

    @property
    def urgency(self) -> tuple[int, int]:
        """The smaller one goes first."""
        return (-self.ticket.priority, self.order)

    def give_up(self, reason: FinishReason) -> list[Event]:
        """What to tell of an answer that ends before its end."""
        if self.generation is not None:
            return list(self.generation.close(reason))
        seed, prompt = self.ticket.prepared.decoding.seed_of(self.index), self.ticket.prepared.prompt
        return [Finished((), "", reason, len(prompt), Stats(), Completion(self.index, seed))]


_SHORT = 16
"""Rows of a prompt's last chunk that are cheaper to run again than one row more is now."""


class SlotRun:
    """A lane's time in a slot."""

    def __init__(
        self, lane: Lane, slot: SlotSequences, proxy: SlotProxy, prefixes: PrefixCache, report: Report
    ) -> None:
        """The lane has a generation over `proxy`, which stands for `slot`; `report` is told if its drafter fails."""
        assert lane.generation is not None
        self._lane, self._generation, self._slot, self._proxy = lane, lane.generation, slot, proxy
        self._prefixes = prefixes
        # Logits of a prompt have to be computed; and without a budget nothing is worth the copies.
        self._reuses = bool(prefixes.budget) and not self._generation.parts.acceptor.scores_prompt
        self._inner = FailSafeDrafter(self._generation.restart(), report)
        self._drafter = LateDrafter(self._inner, records=self._reuses)
        self._generation.parts = replace(self._generation.parts, drafter=self._drafter)
        self._generation.stops_short = _SHORT if self._reuses else 0
        self._place = Place()

    @property
    def may_leave(self) -> bool:
        """Whether it can begin again: not while it scores its prompt, whose scores would come twice."""
        return bool(self._generation.emitted) or not self._generation.parts.acceptor.scores_prompt

    def work(self) -> None:
        """Run to the end of the answer. It waits only where it can be stopped and begin again."""
        generation, deliver = self._generation, self._lane.deliver
        self._proxy.reset()
        if self._reuses and not generation.prefilled:
            while self._prefixes.is_read(generation.text):
                ask(Turn())
            self._resume()
        much = len(generation.text) - self._place.length > _SHORT
        with self._prefixes.reading(generation.text) if self._reuses and much else nullcontext():
            while not generation.prefilled:
                first = generation.prefill()
                self.keep()
                if first is not None:
                    deliver(self._lane, first)
                self._drafter.feed()
        while not generation.done:
            deliver(self._lane, generation.cycle())
            if not generation.done:
                # Nobody begins a cycle before all have shown what the last one brought.
                ask(Turn())
        self.keep()
        for event in generation.close():
            deliver(self._lane, event)

    def _resume(self) -> None:
        """Begin with the longest text that is kept."""
        text = self._generation.text
        self._place = place = self._prefixes.find(text)
        if place.length:
            self._slot.restore(0, place.parts())
            self._inner.observe(np.array(text[1 : place.length + 1]), place.rows())
            cached = self._generation.cached
            self._generation.resume(place.length)
            if self._lane.restarted:
                # What it read itself before it had to leave comes from no earlier request.
                self._generation.cached = cached

    def keep(self) -> None:
        """Keep the state that was reached, if it is that of the whole text but the pending token."""
        if not self._reuses:
            return
        text = self._generation.text
        length, start = int(self._proxy.lengths[0]), self._place.length
        hidden = self._drafter.take()
        # Else rows were committed behind an end, or in the middle of a cycle; or nothing is new.
        if start < length <= len(text) and len(hidden) == length - start:
            tokens = tuple(text[start:length])
            saved = None if self._prefixes.has(self._place, tokens) else self._slot.save(0, start)
            self._place = self._prefixes.keep(self._place, tokens, saved, hidden)
        if self._place.length != length:
            self._reuses = False
            self._drafter.forget()
