"""Speculation fixed, auto and off in turns against one server, so that what else the machine does meets all three."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from mtp_tools.load.latency import Timeline, busy_seconds
from mtp_tools.load.streams import FormError, RefusedError, Said, stream
from mtp_tools.load.traffic import Ask, arrivals

OFF, FIXED, AUTO = "off", "fixed", "auto"
REQUEST_S = 600.0
Note = Callable[[str], None]
CpuClock = Callable[[], float]


def policies(draft_tokens: int) -> dict[str, dict[str, Any]]:
    """Name -> fields of the body."""
    return {OFF: {"draft_tokens": 0}, FIXED: {"draft_tokens": draft_tokens}, AUTO: {"draft_tokens": "auto"}}


@dataclass(frozen=True)
class Level:
    """How many requests are under way at most, and how many arrive in a second."""

    concurrency: int
    rate: float


@dataclass
class Block:
    """What came of one policy in one round.

    Attributes:
        timelines: of the answers that came to their end.
        answers: number of the request -> token ids.
        drafted, accepted: draft tokens of all answers.
        errors: what went wrong, a sentence each.
        cpu_s: processor time of the server; None if it is not ours.
    """

    timelines: list[Timeline] = field(default_factory=list)
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    errors: list[str] = field(default_factory=list)
    cpu_s: float | None = None

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(one.tokens for one in self.timelines)

    @property
    def tokens_per_s(self) -> float:
        """Tokens over the seconds in which anything was under way."""
        seconds = busy_seconds(self.timelines)
        return self.tokens / seconds if seconds else 0.0

    @property
    def tokens_per_cpu_s(self) -> float | None:
        """Tokens over the server's processor time, which other programs disturb less."""
        return self.tokens / self.cpu_s if self.cpu_s else None


Round = dict[str, Block]


async def run_block(
    client: httpx.AsyncClient, model: str, asks: Sequence[Ask], level: Level, options: Mapping[str, Any], seed: int
) -> Block:
    """Send the requests as they arrive, no more at once than the level says; those that came too early wait."""
    block, room, start = Block(), asyncio.Semaphore(level.concurrency), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for one, due in zip(asks, arrivals(len(asks), level.rate, seed), strict=True):
            await asyncio.sleep(start + due - time.perf_counter())
            await room.acquire()
            tasks.create_task(_released(_one(client, model, one, options, block, start + due), room))
    return block


async def run_level(
    client: httpx.AsyncClient,
    model: str,
    rounds: Sequence[Sequence[Ask]],
    level: Level,
    chosen: Mapping[str, Mapping[str, Any]],
    note: Note,
    cpu_clock: CpuClock | None = None,
) -> list[Round]:
    """Every policy answers the requests of each round; the order moves on from round to round.

    `cpu_clock` tells the processor time of the server.
    """
    names, done = list(chosen), []
    for number, asks in enumerate(rounds):
        order = [names[(place + number) % len(names)] for place in range(len(names))]
        found = {}
        for name in order:
            before = None if cpu_clock is None else cpu_clock()
            found[name] = block = await run_block(client, model, asks, level, chosen[name], number)
            if cpu_clock is not None and before is not None:
                block.cpu_s = cpu_clock() - before
        done.append({name: found[name] for name in names})
        note(f"{level.concurrency} at once: round {number + 1} of {len(rounds)} is done")
    return done


async def seconds_alone(client: httpx.AsyncClient, model: str, asks: Sequence[Ask], chosen: Mapping[str, Any]) -> float:
    """Mean seconds of a request that has the server for itself, the first one apart, which warms it up."""
    level = Level(1, float("inf"))
    await run_block(client, model, asks[:1], level, chosen, 0)
    start = time.perf_counter()
    await run_block(client, model, asks, level, chosen, 0)
    return (time.perf_counter() - start) / len(asks)


def differing(found: Round) -> list[int]:
    """Requests of a round that were not answered alike by all policies, though all of them are greedy."""
    numbers = sorted({number for block in found.values() for number in block.answers})
    return [number for number in numbers if len({block.answers.get(number) for block in found.values()}) > 1]


async def _one(
    client: httpx.AsyncClient, model: str, one: Ask, options: Mapping[str, Any], block: Block, due: float
) -> None:
    said, timeline = Said(), Timeline(time.perf_counter(), due)
    try:
        await stream(client, one.body(model, **options), said)
    except (httpx.HTTPError, RefusedError, FormError) as error:
        block.errors.append(f"request {one.number}: {type(error).__name__}: {error}")
        return
    timeline.ended, timeline.chunks = time.perf_counter(), said.chunks
    block.timelines.append(timeline)
    block.answers[one.number] = tuple(said.token_ids)
    if said.stats is not None:
        block.drafted += said.stats["drafted"]
        block.accepted += said.stats["accepted"]


async def _released(work: Awaitable[None], room: asyncio.Semaphore) -> None:
    try:
        await work
    finally:
        room.release()
