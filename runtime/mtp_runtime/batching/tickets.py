"""A request on its way through a scheduler: what its sender holds, and what it is told."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mtp_engines.errors import MtpError
from mtp_runtime.events import Event, Finished
from mtp_runtime.prepare import Prepared
from mtp_runtime.request import Request


@dataclass(frozen=True)
class Failed:
    """The end of an answer that could not be finished: the model made no numbers, or something broke."""

    error: Exception
    index: int = 0


Told = Event | Failed
Listener = Callable[[Told], None]


@dataclass(eq=False)
class Ticket:
    """One request.

    Attributes:
        request, prepared: what was asked for; the prepared one has its seed.
        priority: requests with a higher one go first, and may take the slot of one with a lower.
        deadline: when it is given up, on the scheduler's clock; None never.
        listener: told of every event, in the scheduler's thread; it must not wait. None keeps them for iteration.
        submitted: when it came, on the scheduler's clock.
    """

    request: Request
    prepared: Prepared
    priority: int = 0
    deadline: float | None = None
    listener: Listener | None = None
    submitted: float = field(default_factory=time.monotonic)
    _kept: queue.SimpleQueue[Told] = field(default_factory=queue.SimpleQueue)
    _results: list[Finished] | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _wake: list[Callable[[], None]] = field(default_factory=list)

    def cancel(self) -> None:
        """Give it up; its slot is free after the cycle that runs now. From any thread, more than once too."""
        self.give_up()
        for wake in self._wake:
            wake()

    def give_up(self) -> None:
        """As `cancel`, for the scheduler itself, which needs not be told."""
        self._cancelled.set()

    def on_cancel(self, wake: Callable[[], None]) -> None:
        """Call this too when it is cancelled."""
        self._wake.append(wake)

    @property
    def cancelled(self) -> bool:
        """Whether it was given up."""
        return self._cancelled.is_set()

    def tell(self, told: Told) -> None:
        """Hand an event on."""
        (self._kept.put if self.listener is None else self.listener)(told)

    def __iter__(self) -> Iterator[Event]:
        """Every event, as it comes, up to the last `Finished`.

        Raises:
            MtpError: the answer failed.
        """
        left = self.prepared.decoding.completions
        while left:
            told = self._kept.get()
            if isinstance(told, Failed):
                raise told.error if isinstance(told.error, MtpError) else RuntimeError(str(told.error)) from told.error
            left -= isinstance(told, Finished)
            yield told

    def results(self) -> list[Finished]:
        """Wait for every answer; by their number. Events are there once: iterate, or call this."""
        if self._results is None:
            finished = [event for event in self if isinstance(event, Finished)]
            self._results = sorted(finished, key=lambda event: event.completion.index)
        return self._results
