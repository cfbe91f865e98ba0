"""Code that waits: a function in a greenlet, the call that it waits with, and how it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

from mtp_runtime.batching.calls import Call, Turn


class Stopped(BaseException):
    """Thrown into a task where it waits, to end it; not an Exception, so that nothing in between takes it for one."""


@dataclass(eq=False)
class Task:
    """A function that runs until it waits for an answer.

    Attributes:
        slot: its place among the slots.
        call: what it waits for; None when it has ended.
        error: what ended it, if it failed.
    """

    slot: int
    work: Callable[[], None]
    call: Call | None = field(default_factory=Turn)
    error: BaseException | None = None
    _thread: greenlet = field(init=False)
    _begun: bool = False

    def __post_init__(self) -> None:
        """Ready, not begun."""
        self._thread = greenlet(self.work)

    @property
    def ended(self) -> bool:
        """Whether it will ask nothing more."""
        return self.call is None

    def answer(self, value: Any) -> None:
        """Go on with an answer until the next call."""
        self._go(value)

    def fail(self, error: BaseException) -> None:
        """Raise an error where it waits."""
        self._go(error, throw=True)

    def _go(self, value: Any, *, throw: bool = False) -> None:
        self._thread.parent = getcurrent()
        given, self._begun = self._begun, True
        try:
            if throw:
                call = self._thread.throw(value)
            else:
                call = self._thread.switch(value) if given else self._thread.switch()
        except Stopped:
            self.call = None
            return
        except BaseException as error:  # An interrupt, too: others have to be answered first, see `Scheduler.step`.
            self.call, self.error = None, error
            return
        self.call = None if self._thread.dead else call
