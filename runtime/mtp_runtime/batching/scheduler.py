"""Who runs when: a queue, slots, priorities, deadlines, and rounds over whoever is in a slot."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mtp_engines.engine import SlotSequences
from mtp_engines.errors import RequestError
from mtp_runtime.api import Model
from mtp_runtime.batching.calls import SlotProxy
from mtp_runtime.batching.company import Company
from mtp_runtime.batching.lanes import Lane, SlotRun
from mtp_runtime.batching.options import BatchOptions, ClosedError, QueueFullError
from mtp_runtime.batching.prefixes import PrefixCache
from mtp_runtime.batching.room import Room
from mtp_runtime.batching.rounds import Rounds
from mtp_runtime.batching.tasks import Task
from mtp_runtime.batching.telling import Telling
from mtp_runtime.batching.tickets import Failed, Listener, Ticket
from mtp_runtime.batching.watch import Watch
from mtp_runtime.events import FinishReason
from mtp_runtime.request import Request

_LOG = logging.getLogger(__name__)
__all__ = ["BatchOptions", "ClosedError", "QueueFullError", "Scheduler"]


class Scheduler:
    """Runs requests together over the slots of one model. `step` belongs to one thread, all else to any.

    Attributes:
        slots: answers at once.
        prefixes: states of texts that were read before.
    """

    def __init__(
        self,
        model: Model,
        options: BatchOptions | None = None,
        watch: Watch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing runs yet; see `start` and `step`.

        Raises:
            RequestError: more slots than the bundle was built for, or `cache_rows` where slots share nothing.
        """
        options = options or BatchOptions()
        limits = model.engine.limits
        self.model, self._options, self._watch, self._clock = model, options, watch or Watch(), clock
        self.slots = limits.max_batch_size if options.slots is None else options.slots
        slots = model.engine.sequences(self.slots, options.cache_rows)
        assert isinstance(slots, SlotSequences), "every backend runs its sequences in windows"
        self._slots, self._room = slots, Room(slots, limits.max_draft_tokens + 1)
        budget = limits.prefill_chunk if options.prefill_budget is None else options.prefill_budget
        self._rounds = Rounds(self._slots, limits, budget)
        self.prefixes = PrefixCache(options.prefix_bytes)
        self._telling = Telling(self._watch)
        self._company = Company(model.auto)
        self._waiting: list[Lane] = []
        self._running: dict[int, tuple[Lane, SlotRun]] = {}
        self._orders = itertools.count()
        self._changed = threading.Condition()
        self._closing = self._dropping = False
        self._thread: threading.Thread | None = None

    # From any thread

    def submit(
        self, request: Request, *, priority: int = 0, timeout: float | None = None, listener: Listener | None = None
    ) -> Ticket:
        """Queue a request.

        Args:
            request: what to generate.
            priority: higher ones go first.
            timeout: seconds after which it is given up, wherever it is.
            listener: see `Ticket`.

        Raises:
            RequestError: it can never be served.
            QueueFullError: too many wait.
            ClosedError: the scheduler closes.
        """
        prepared = self.model.prompts.prepare(request, self.model.manifest, self.model.draft is not None)
        if prepared.draft_branches:
            raise RequestError(
                f"draft_branches is {prepared.draft_branches}, but a tree takes several slots, which others may need; "
                "leave it out, or use `mtp-run generate`."
            )
        self._room.require(prepared)
        if timeout is not None and not timeout > 0:
            raise RequestError(f"the time limit is {timeout} seconds, expected more than 0, or none.")
        prepared = replace(prepared, decoding=prepared.decoding.seeded())
        now = self._clock()
        ticket = Ticket(request, prepared, priority, None if timeout is None else now + timeout, listener, now)
        ticket.on_cancel(self._notify)
        with self._changed:
            if self._closing:
                raise ClosedError("the server is shutting down; send the request to another one, or later.")
            self._options.check_room(prepared.decoding.completions, len(self._waiting), self._free(), self.slots)
            for index in range(prepared.decoding.completions):
                self._waiting.append(Lane(ticket, index, next(self._orders), self._telling.deliver))
            self._watch.submitted(ticket)
            self._changed.notify()
        return ticket

    @property
    def queued(self) -> int:
        """Answers that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Answers that have a slot."""
        return len(self._running)

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: it was not closed, and its thread has not failed."""
        return not self._closing

    def start(self) -> None:
        """Run in a thread of its own until `close`; should that thread fail, so do all requests, and no more come."""
        self._thread = threading.Thread(target=self._run, name="mtp-scheduler", daemon=True)
        self._thread.start()

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests; finish those that are here, or give them up; without `start`, by steps."""
        with self._changed:
            self._closing = True
            self._dropping |= not drain
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    # In the scheduler's thread

    def step(self) -> bool:
        """Give up, admit, run one round; whether anything is left to do.

        Raises:
            KeyboardInterrupt: it came while an answer ran, which has failed by it. Another step goes on with the rest.
        """
        self._drop(self._clock())
        self._grow()
        self._admit()
        self._company.gather(self.running)
        ended = self._rounds.run()
        self._company.conclude(self._rounds.newest)
        for task in ended:
            self._ended(task)
        self._watch.round(self._rounds.widths, self)
        for task in ended:
            if task.error is not None and not isinstance(task.error, Exception):
                raise task.error
        return bool(self._running or self._waiting)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (self._running or self._waiting):
                        if self._closing:
                            return
                        self._changed.wait()
                self.step()
        except BaseException as error:  # Whatever it was, nobody may wait for this thread any longer.
            _LOG.critical("the scheduler failed, and every request with it", exc_info=error)
            with self._changed:
                self._closing = True
                lanes = [*self._waiting, *(lane for lane, _ in self._running.values())]
                self._waiting, self._running = [], {}
            for lane in lanes:
                self._telling.tell(lane, Failed(RuntimeError(f"the scheduler failed: {error!r}"), lane.index))

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify()

    def _free(self) -> int:
        return self.slots - len(self._running)

    def _drop(self, now: float) -> None:
        """End what was cancelled or is too late."""
        for lane in [*self._waiting, *(lane for lane, _ in self._running.values())]:
            ticket = lane.ticket
            if ticket.cancelled or self._dropping:
                self._give_up(lane, "cancelled")
            elif ticket.deadline is not None and now >= ticket.deadline:
                self._give_up(lane, "timeout")

    def _give_up(self, lane: Lane, reason: FinishReason) -> None:
        with self._changed:
            if lane in self._waiting:
                self._waiting.remove(lane)
        if lane.task is not None:
            self._rounds.stop(lane.task)
            self._vacate(lane)
        for event in lane.give_up(reason):
            self._telling.deliver(lane, event)

    def _admit(self) -> None:
        """Give free slots to who waits, the most urgent first; take one from who is less urgent if there is none."""
        while self._waiting:
            with self._changed:
                lane = min(self._waiting, key=lambda one: one.urgency)
            slot = self._place(lane)
            if slot is None:
                assert self._running, "a text that may be submitted has room where nobody else has any"
                return
            with self._changed:
                self._waiting.remove(lane)
            try:
                self._enter(lane, slot)
            except Exception as error:  # The request's own fault, or the engine's; others go on.
                self._room.give_back(slot)
                self._telling.fail(lane, error)

    def _place(self, lane: Lane) -> int | None:
        """A free slot and room for an answer in it, of those of lower priority if need be; None if it has to wait."""
        while True:
            slot = next((slot for slot in range(self.slots) if slot not in self._running), None)
            if slot is not None and self._room.take(lane, slot):
                return slot
            if not self._drive_out(lambda other: other.ticket.priority < lane.ticket.priority):
                return None

    def _grow(self) -> None:
        """Hold the rows of the next round, of the most urgent ones first; the least urgent ones leave for them."""
        for slot, (lane, _) in sorted(self._running.items(), key=lambda item: item[1][0].urgency):
            while lane.task is not None and not self._room.take(lane, slot):
                left = self._drive_out(lambda other: True)
                assert left, "who has to stay holds all that its prompt needs, so one that lacks room can leave itself"

    def _drive_out(self, may_go: Callable[[Lane], bool]) -> bool:
        """Whether somebody had to leave, the least urgent of those that may. What it said is read again later."""
        leaving = [(lane, run) for lane, run in self._running.values() if may_go(lane) and run.may_leave]
        if not leaving:
            return False
        lane, run = max(leaving, key=lambda pair: pair[0].urgency)
        assert lane.task is not None
        run.keep()
        self._rounds.stop(lane.task)
        self._vacate(lane)
        lane.restarted = True
        with self._changed:
            self._waiting.append(lane)
        self._watch.preempted(lane.ticket)
        return True

    def _enter(self, lane: Lane, slot: int) -> None:
        ticket, report = lane.ticket, partial(self._telling.drafter_failed, lane)
        if lane.generation is None:
            lane.proxy = SlotProxy(self._slots, slot)
            lane.generation = self.model.completion(ticket.prepared, ticket.request, lane.index, lane.proxy)
            self._company.join(lane.generation, ticket.prepared)
        assert lane.proxy is not None
        lane.proxy.move(slot)
        run = SlotRun(lane, self._slots.window(slot, 1), lane.proxy, self.prefixes, report)
        lane.task = self._rounds.start(slot, run.work)
        self._running[slot] = (lane, run)
        self._watch.entered(ticket)

    def _ended(self, task: Task) -> None:
        lane = next((lane for lane, _ in self._running.values() if lane.task is task), None)
        if lane is None:
            return
        self._vacate(lane)
        if task.error is not None:
            # As a gap between others it still runs, and what broke it would send each of them on a run alone.
            self._slots.window(task.slot, 1).reset()
            self._telling.fail(lane, task.error)

    def _vacate(self, lane: Lane) -> None:
        slot = next(slot for slot, (other, _) in self._running.items() if other is lane)
        del self._running[slot]
        lane.task = None
        self._room.give_back(slot)
