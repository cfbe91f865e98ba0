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
from mtp_engines.errors import MtpError, RequestError
from mtp_runtime.api import Model
from mtp_runtime.batching.calls import SlotProxy
from mtp_runtime.batching.company import Company
from mtp_runtime.batching.lanes import Lane, SlotRun, take_turns
from mtp_runtime.batching.options import BatchOptions, ClosedError, QueueFullError
from mtp_runtime.batching.prefixes import PrefixCache
from mtp_runtime.batching.rounds import Rounds
from mtp_runtime.batching.tasks import Task
from mtp_runtime.batching.tickets import Failed, Listener, Ticket
from mtp_runtime.batching.watch import Watch
from mtp_runtime.events import Event, Finished, FinishReason
from mtp_runtime.request import Request

_LOG = logging.getLogger(__name__)
__all__ = ["BatchOptions", "ClosedError", "QueueFullError", "Scheduler"]


class Scheduler:
    """Runs requests together over the slots of one model. `step` belongs to one thread, all else to any.

    Attributes:
        slots: answers at once.
        batched: whether they share runs; on a backend without slots of its own they take turns instead.
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
            RequestError: more slots than the bundle was built for.
        """
        options = options or BatchOptions()
        limits = model.engine.limits
        self.model, self._options, self._watch, self._clock = model, options, watch or Watch(), clock
        self.slots = limits.max_batch_size if options.slots is None else options.slots
        sequences = model.engine.sequences(self.slots)
        self.batched = isinstance(sequences, SlotSequences)
        self._slots = sequences if isinstance(sequences, SlotSequences) else None
        budget = limits.prefill_chunk if options.prefill_budget is None else options.prefill_budget
        self._rounds = Rounds(self._slots, limits, budget)
        self.prefixes = PrefixCache(options.prefix_bytes if self.batched else 0)
        self._company = Company(model.auto, lambda: self.running)
        self._waiting: list[Lane] = []
        self._running: dict[int, tuple[Lane, SlotRun | None]] = {}
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
                self._waiting.append(Lane(ticket, index, next(self._orders), self._deliver))
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
        self._admit()
        ended = self._rounds.run()
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
                self._tell(lane, Failed(RuntimeError(f"the scheduler failed: {error!r}"), lane.index))

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
            self._deliver(lane, event)

    def _admit(self) -> None:
        """Give free slots to who waits, the most urgent first; take one from who is less urgent if there is none."""
        while self._waiting:
            with self._changed:
                lane = min(self._waiting, key=lambda one: one.urgency)
            if not self._free() and not self._make_room(lane):
                return
            with self._changed:
                self._waiting.remove(lane)
            try:
                self._enter(lane)
            except Exception as error:  # The request's own fault, or the engine's; others go on.
                self._fail(lane, error)

    def _make_room(self, lane: Lane) -> bool:
        """Whether somebody of lower priority had to leave. What it has said so far is read again later."""
        lower = [
            (other, run)
            for other, run in self._running.values()
            if other.ticket.priority < lane.ticket.priority and run is not None and run.may_leave
        ]
        if not lower:
            return False
        other, run = max(lower, key=lambda pair: pair[0].urgency)
        assert other.task is not None
        run.keep()
        self._rounds.stop(other.task)
        self._vacate(other)
        other.restarted = True
        with self._changed:
            self._waiting.append(other)
        self._watch.preempted(other.ticket)
        return True

    def _enter(self, lane: Lane) -> None:
        slot = next(slot for slot in range(self.slots) if slot not in self._running)
        ticket, run = lane.ticket, None
        asked, report = (ticket.prepared, ticket.request, lane.index), partial(self._drafter_failed, lane)
        if self._slots is None:
            lane.generation = self.model.completion(*asked)
            lane.task = self._rounds.start(slot, lambda: take_turns(lane, report))
        else:
            if lane.generation is None:
                lane.proxy = SlotProxy(self._slots, slot)
                lane.generation = self.model.completion(*asked, lane.proxy)
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
            if self._slots is not None:
                # As a gap between others it still runs, and what broke it would send each of them on a run alone.
                self._slots.window(task.slot, 1).reset()
            self._fail(lane, task.error)

    def _vacate(self, lane: Lane) -> None:
        self._running = {slot: pair for slot, pair in self._running.items() if pair[0] is not lane}
        lane.task = None

    def _fail(self, lane: Lane, error: BaseException) -> None:
        if not isinstance(error, MtpError):
            _LOG.error("an answer failed", exc_info=error)
        failure = error if isinstance(error, Exception) else RuntimeError(f"interrupted by {error!r}")
        self._watch.failed(lane.ticket, failure)
        self._tell(lane, Failed(failure, lane.index))
        # Nobody waits for its other answers.
        lane.ticket.give_up()

    def _drafter_failed(self, lane: Lane, error: Exception) -> None:
        if lane.degraded:
            return
        lane.degraded = True
        named = (lane.ticket.prepared.drafter, type(error).__name__, error)
        _LOG.warning("the drafter %s failed, its answer goes on without drafts: %s: %s", *named)
        self._watch.degraded(lane.ticket, error)

    def _deliver(self, lane: Lane, event: Event) -> None:
        if isinstance(event, Finished):
            self._watch.finished(lane.ticket, event)
        else:
            self._watch.emitted(lane.ticket, event)
        self._tell(lane, event)

    def _tell(self, lane: Lane, told: Event | Failed) -> None:
        try:
            lane.ticket.tell(told)
        except Exception:  # A listener is somebody else's code.
            _LOG.exception("a listener failed; its request is given up")
            lane.ticket.give_up()
