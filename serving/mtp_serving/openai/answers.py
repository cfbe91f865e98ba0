"""From the scheduler's thread to the event loop: the answers to one request of HTTP.

A listener in the scheduler's thread hands every event to the loop and goes on. What a client has not taken yet is kept
as one event an answer, so a slow reader costs the text of its answers at most, and stalls nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from mtp_runtime.batching.tickets import Failed, Listener, Ticket, Told
from mtp_runtime.events import Emitted, Finished
from mtp_runtime.sampling.logprobs import TokenLogprobs
from mtp_serving.openai.errors import api_error_from

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client has closed its connection: nobody waits for the response."""


@dataclass
class _Kept:
    """What one answer has said and nobody has taken."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    drafted: list[bool] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, event: Emitted) -> None:
        """One more event."""
        self.ids.extend(event.token_ids)
        self.drafted.extend(event.drafted)
        self.texts.append(event.text)
        if event.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(event.logprobs)

    def take(self, number: int) -> Emitted | None:
        """All events as one; None if there were none."""
        if not self.ids and not self.texts:
            return None
        scores = None if self.logprobs is None else tuple(self.logprobs)
        event = Emitted(tuple(self.ids), "".join(self.texts), scores, number, tuple(self.drafted))
        self.ids, self.texts, self.logprobs, self.drafted = [], [], None, []
        return event


class Answers:
    """Answers to the prompts of one request, each with `n`; answer i of prompt p has the number p * n + i.

    Attributes:
        finished: answers that have ended, by their number.
        first: when the first token came, on the loop's clock; None before.
        begun: when the request came.
    """

    def __init__(self, completions: int, prompts: int) -> None:
        """Made in the event loop, before anything is submitted."""
        self._loop = asyncio.get_running_loop()
        self._completions, self._open = completions, completions * prompts
        self._tickets: list[Ticket] = []
        self._kept: dict[int, _Kept] = {}
        self._ready = asyncio.Event()
        self._error: Exception | None = None
        self._given_up = False
        self._ended: Callable[[], None] | None = None
        self.finished: dict[int, Finished] = {}
        self.first: float | None = None
        self.begun = self._loop.time()

    def listener(self, prompt: int) -> Listener:
        """For the ticket of a prompt."""

        def tell(told: Told) -> None:
            self._loop.call_soon_threadsafe(self._put, prompt, told)

        return tell

    def add(self, ticket: Ticket) -> None:
        """A ticket whose listener is of here; from any thread."""
        self._tickets.append(ticket)
        if self._given_up:
            ticket.cancel()

    def cancel(self) -> None:
        """Give up what has not ended; from any thread."""
        self._given_up = True
        for ticket in self._tickets:
            ticket.cancel()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call this as soon as every answer has ended, which may be now."""
        if self._open:
            self._ended = call
        else:
            call()

    async def events(self) -> AsyncIterator[tuple[int, Emitted | Finished]]:
        """Every answer's events under its number, as they come, until all have ended.

        Raises:
            ApiError: an answer failed; the others are given up.
        """
        left = self._open + len([kept for kept in self._kept.values() if kept.finished is not None])
        while left or self._error is not None:
            await self._ready.wait()
            self._ready.clear()
            kept, self._kept = self._kept, {}
            for number, one in kept.items():
                if (event := one.take(number)) is not None:
                    yield number, event
                if one.finished is not None:
                    left -= 1
                    yield number, one.finished
            if self._error is not None:
                raise api_error_from(self._error) from self._error

    async def results(self) -> list[Finished]:
        """Wait for all answers, in the order of their numbers.

        Raises:
            ApiError: an answer failed; the others are given up.
        """
        async for _ in self.events():
            pass
        return [self.finished[number] for number in sorted(self.finished)]

    def _put(self, prompt: int, told: Told) -> None:
        if isinstance(told, Failed):
            self._error = self._error or told.error
            self.cancel()
            self._end_one()
            return
        index = told.completion.index if isinstance(told, Finished) else told.index
        number = prompt * self._completions + index
        kept = self._kept.setdefault(number, _Kept())
        if isinstance(told, Finished):
            kept.finished = self.finished[number] = told
            self._end_one()
            return
        kept.add(told)
        if told.token_ids and self.first is None:
            self.first = self._loop.time()
        self._ready.set()

    def _end_one(self) -> None:
        self._open -= 1
        self._ready.set()
        if not self._open and self._ended is not None:
            self._ended()


async def gone(receive: Receive) -> None:
    """Wait until the client closes its connection; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which is cancelled if the client goes first.

    Raises:
        ClientGoneError: it did.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(gone(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await end(working, leaving)


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end, whatever it is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
