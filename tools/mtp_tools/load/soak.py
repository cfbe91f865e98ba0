"""Minutes of a server under everything that goes wrong: clients that go, deadlines, nonsense, and being killed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from mtp_tools.load.acts import Client, Findings
from mtp_tools.load.blocks import Note
from mtp_tools.load.expected import Known, known_answers
from mtp_tools.load.measuring import client_of, served_by
from mtp_tools.load.memory import Growth, growth_of
from mtp_tools.load.processes import ServerError, ServerProcess
from mtp_tools.load.streams import Said, Tamper
from mtp_tools.load.traffic import Lengths

_KNOWN = 24
_SAMPLE_S = 0.5
_IDLE_S = 30.0
_PREFIX_BYTES = 32 << 20
"""So little that it is full, and thrown away from, within seconds."""


@dataclass(frozen=True)
class SoakPlan:
    """What is done.

    Attributes:
        seconds: how long clients ask.
        kills: how often the server is killed meanwhile.
        clients: that ask at the same time.
        prompt, answer: lengths.
        seed: of everything that is drawn.
        tamper: a fault on the way to the clients, for controls.
    """

    seconds: float
    kills: int
    clients: int
    prompt: Lengths
    answer: Lengths
    seed: int
    tamper: Tamper | None = None


@dataclass
class Outcome:
    """What came of it; nothing is wrong if there are no failures."""

    findings: Findings
    seconds: float
    lives: list[Growth | None] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """A sentence each."""
        return self.findings.failures

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        waits = {
            name: {"times": len(values), "median_s": median(values), "most_s": max(values)}
            for name, values in sorted(self.findings.waits.items())
        }
        return {
            "seconds": self.seconds,
            "counts": dict(sorted(self.findings.counts.items())),
            "right_answer_after": waits,
            "memory": [None if one is None else one.as_dict() for one in self.lives],
            "failures": self.failures,
        }


class _Life:
    """The server as the clients see it: where it is, and whether it is there."""

    def __init__(self, server: ServerProcess) -> None:
        self.server, self.url = server, ""
        self.up = asyncio.Event()
        self.number = 0
        self.samples: list[int] = []
        self.answered_before = 0

    async def begin(self) -> None:
        """Start the server."""
        self.url = await asyncio.to_thread(self.server.start)
        self.number += 1
        self.samples = []
        self.up.set()

    def kill(self) -> None:
        """Kill it in the middle of whatever it does."""
        self.up.clear()
        self.server.kill()


async def soak(
    bundle: Path, material: list[int], plan: SoakPlan, arguments: Sequence[str], log: Path, note: Note
) -> Outcome:
    """Run it all.

    Args:
        bundle: that is served.
        material: token ids that prompts are cut from.
        plan: what to do.
        arguments: further options of `mtp-run serve`.
        log: takes the server's messages.
        note: told of progress.
    """
    known = known_answers(bundle, material, _KNOWN, plan.prompt, plan.answer, plan.seed)
    note(f"{len(known)} answers are known; the server starts")
    server = ServerProcess(bundle, ["--prefix-cache-bytes", str(_PREFIX_BYTES), *arguments], log)
    findings = Findings()
    outcome, life = Outcome(findings, plan.seconds), _Life(server)
    try:
        await life.begin()
        async with client_of(life.url) as client:
            served = await served_by(client)
        end = time.perf_counter() + plan.seconds
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(life))
            clients = [
                tasks.create_task(_client(life, Client(known, served, findings, plan.seed + 1 + n, plan.tamper), end))
                for n in range(plan.clients)
            ]
            await _supervise(life, plan, outcome, note)
            await asyncio.gather(*clients)
            watching.cancel()
        await _require_idle(life, findings)
        _close_life(life, outcome)
        if (code := await asyncio.to_thread(server.stop)) != 0:
            findings.fail(f"the server ended with {code} when it was asked to end")
    except* ServerError as errors:
        for error in errors.exceptions:
            findings.fail(str(error))
    finally:
        server.kill()
    return outcome


async def _supervise(life: _Life, plan: SoakPlan, outcome: Outcome, note: Note) -> None:
    """Kill and start it, at equal distances."""
    for number in range(plan.kills):
        await asyncio.sleep(plan.seconds / (plan.kills + 1))
        _close_life(life, outcome)
        started = time.perf_counter()
        life.kill()
        await life.begin()
        outcome.findings.counts["kills"] += 1
        outcome.findings.waits.setdefault("kill", []).append(time.perf_counter() - started)
        note(f"killed {number + 1} of {plan.kills} times; {len(outcome.failures)} failures so far")


async def _client(life: _Life, client: Client, end: float) -> None:
    """Act until the time is over; what a kill cut off is done again, so that every request has one answer."""
    findings = client.findings
    while time.perf_counter() < end:
        await life.up.wait()
        async with client_of(life.url) as connection:
            number = life.number
            while time.perf_counter() < end and life.number == number:
                name, known = client.draw()
                await _until_answered(life, connection, client, name, known, findings)


async def _until_answered(
    life: _Life, connection: httpx.AsyncClient, client: Client, name: str, known: Known, findings: Findings
) -> None:
    number, said = life.number, Said()
    try:
        await client.act(connection, name, known, said)
        return
    except httpx.HTTPError as error:
        if life.up.is_set() and life.number == number:
            findings.fail(f"{name} of request {known.ask.number}: {type(error).__name__}: {error}, without a kill")
            return
    findings.counts["cut by a kill"] += 1
    if not said.is_checked:
        findings.check(known, said, is_whole=False)
    await life.up.wait()
    async with client_of(life.url) as again:
        await client.act(again, name, known, Said())


async def _watch(life: _Life) -> None:
    while True:
        await asyncio.sleep(_SAMPLE_S)
        if life.up.is_set() and (size := life.server.rss_bytes()) is not None:
            life.samples.append(size)


def _close_life(life: _Life, outcome: Outcome) -> None:
    answered = len(outcome.findings.identities)
    growth = growth_of(life.samples, answered - life.answered_before)
    life.answered_before = answered
    outcome.lives.append(growth)
    if growth is not None and not growth.is_flat:
        outcome.findings.fail(
            f"the memory of the server grew from {growth.before} to {growth.after} bytes within {growth.requests} "
            f"answers, more than the {growth.allowed} bytes that it may"
        )


async def _require_idle(life: _Life, findings: Findings) -> None:
    """Nothing may run or wait once all clients have gone."""
    async with client_of(life.url) as client:
        end = time.perf_counter() + _IDLE_S
        while True:
            text = (await client.get("/metrics")).text
            busy = [
                line
                for line in text.splitlines()
                if line.startswith(("mtp:num_requests_running", "mtp:num_requests_waiting"))
                and float(line.rsplit(" ", 1)[1]) > 0
            ]
            if not busy:
                return
            if time.perf_counter() > end:
                findings.fail(f"{_IDLE_S:.0f} s behind the last client: {'; '.join(busy)}")
                return
            await asyncio.sleep(_SAMPLE_S)
