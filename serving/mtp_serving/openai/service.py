"""What a server has: the model, its scheduler, its metrics; and how a request goes through them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mtp_engines.errors import RequestError
from mtp_runtime.api import Model
from mtp_runtime.batching.scheduler import BatchOptions, ClosedError, QueueFullError, Scheduler
from mtp_serving.openai.access import write_line
from mtp_serving.openai.answers import Answers
from mtp_serving.openai.bodies import CommonBody
from mtp_serving.openai.errors import ApiError
from mtp_serving.openai.mapping import Plan, refused_by_bundle, require_model, seconds_of
from mtp_serving.openai.metrics import Metrics
from mtp_serving.openai.options import ServeOptions
from mtp_serving.openai.params import param_of

Body = TypeVar("Body", bound=CommonBody)
Planner = Callable[[Body, str, Model, ServeOptions], Plan]


@dataclass
class Exchange:
    """One request under way.

    Attributes:
        identity: its id.
        created: seconds since 1970.
        plan: what it asks for.
        answers: what comes.
    """

    identity: str
    created: int
    plan: Plan
    answers: Answers


class Service:
    """A model that is served.

    Attributes:
        draining: it takes no more requests, since it is about to end.
        under_way: requests that are answered, or whose answer is being sent.
    """

    def __init__(self, model: Model, options: ServeOptions, batch: BatchOptions | None = None) -> None:
        """The scheduler's thread runs from here on; end it with `close`.

        Raises:
            RequestError: more slots than the bundle was built for.
        """
        batch = batch or BatchOptions()
        self.model, self.options = model, options
        self._max_queue = batch.max_queue
        self.metrics = Metrics(options.name)
        self.scheduler = Scheduler(model, batch, self.metrics)
        self.metrics.read(self.scheduler)
        self.created = int(time.time())
        self.draining, self.under_way = False, 0
        self.scheduler.start()

    @property
    def ready(self) -> bool:
        """Whether a request would be answered."""
        return not self.draining and self.scheduler.is_open

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests; finish those that are here, or give them up. Waits for the scheduler's thread."""
        self.draining = True
        self.scheduler.close(drain=drain)

    @asynccontextmanager
    async def exchange(self, body: Body, prefix: str, planner: Planner[Body]) -> AsyncIterator[Exchange]:
        """Submit what a body asks for; behind the block all of it has ended or is given up.

        Raises:
            ApiError, MtpError: it is refused.
        """
        require_model(body, self.options)
        if self.draining:
            raise ClosedError("the server is shutting down; send the request to another one, or later.")
        if self.under_way >= self.options.max_open:
            raise QueueFullError(
                f"{self.under_way} requests are under way already, those included whose answers were not fetched yet, "
                f"and at most {self.options.max_open} may be; try again later."
            )
        self.under_way += 1
        identity, created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        answers = None
        try:
            try:
                # Rendering and encoding take time, and must not stall what streams.
                plan = await asyncio.to_thread(self._plan, body, identity, planner)
                answers = Answers(body.n, len(plan.requests))
                await asyncio.shield(asyncio.to_thread(self._submit, plan, body, answers))
            except RequestError as error:
                raise ApiError(str(error), param_of(str(error), body)) from error
            yield Exchange(identity, created, plan, answers)
        finally:
            self.under_way -= 1
            if answers is not None:
                answers.cancel()
                # What was given up ends a little later, and only then its tokens are known.
                answers.when_ended(partial(write_line, identity, answers))

    def _plan(self, body: Body, identity: str, planner: Planner[Body]) -> Plan:
        plan = planner(body, identity, self.model, self.options)
        asked, most = body.n * len(plan.requests), self.scheduler.slots + self._max_queue
        if asked > most:
            raise ApiError(
                f"the request asks for {asked} answers, and at most {most} may run and wait; ask for fewer.",
                "n" if len(plan.requests) == 1 else "prompt" if body.n == 1 else None,
            )
        refused_by_bundle(plan, self.model)
        return plan

    def _submit(self, plan: Plan, body: CommonBody, answers: Answers) -> None:
        timeout = seconds_of(body, self.options)
        for number, request in enumerate(plan.requests):
            listener = answers.listener(number)
            answers.add(self.scheduler.submit(request, priority=body.priority, timeout=timeout, listener=listener))
