"""What a client of the soak does, one act after another, and what it must find."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from mtp_tools.load.expected import Known
from mtp_tools.load.malformed import malformed_of, wrong_reply
from mtp_tools.load.measuring import Served
from mtp_tools.load.streams import FormError, RefusedError, Said, Tamper, ask, stream

SHARES = {"stream": 0.4, "whole": 0.15, "leave": 0.2, "deadline": 0.15, "malformed": 0.1}
"""Of all acts."""
_MOST_FAILURES = 100
_DEADLINE_S = 0.3
"""Mean of a deadline, about as long as an answer takes."""


@dataclass
class Findings:
    """What all clients found.

    Attributes:
        counts: acts by their end.
        failures: what is wrong, a sentence each; the first ones.
        identities: ids of responses, each of which may come once.
        waits: seconds from a fault to the next right answer, by fault.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    identities: set[str] = field(default_factory=set)
    waits: dict[str, list[float]] = field(default_factory=dict)

    def fail(self, sentence: str) -> None:
        """Keep it."""
        self.counts["failures"] += 1
        if len(self.failures) < _MOST_FAILURES:
            self.failures.append(sentence)

    def check(self, known: Known, said: Said, *, is_whole: bool) -> None:
        """Compare what was said with the answer that is known; the part of it that came if it was cut."""
        said.is_checked = True
        if said.identity is not None:
            if said.identity in self.identities:
                self.fail(f"two responses have the id {said.identity}")
            self.identities.add(said.identity)
        which = f"request {known.ask.number} ({dict(known.ask.options)})"
        ids, count = tuple(said.token_ids), len(said.token_ids)
        if ids != (known.token_ids if is_whole else known.token_ids[:count]):
            place = next((i for i, (a, b) in enumerate(zip(ids, known.token_ids, strict=False)) if a != b), count)
            self.fail(f"{which}: {count} of {len(known.token_ids)} tokens, wrong from place {place} on")
        elif said.text != known.text if is_whole else not known.begins_with(said.text):
            self.fail(f"{which}: the text is {said.text[-40:]!r} at its end, expected {known.text[-40:]!r}")
        if is_whole and said.reason != known.reason:
            self.fail(f"{which}: it ended with {said.reason}, expected {known.reason}")


class Client:
    """One of those that ask at the same time."""

    def __init__(
        self,
        known: Sequence[Known],
        served: Served,
        findings: Findings,
        seed: int,
        tamper: Tamper | None = None,
    ) -> None:
        self._known, self._served, self.findings, self._tamper = known, served, findings, tamper
        self._random = np.random.default_rng(seed)

    def draw(self) -> tuple[str, Known]:
        """What to do next, and with which request."""
        act = str(self._random.choice(list(SHARES), p=list(SHARES.values())))
        return act, self._known[int(self._random.integers(len(self._known)))]

    async def act(self, client: httpx.AsyncClient, name: str, known: Known, said: Said) -> None:
        """Do it, and see that the server answers rightly behind every fault.

        Raises:
            httpx.HTTPError: the connection broke.
        """
        try:
            await getattr(self, f"_{name}")(client, known, said)
            if name in ("leave", "deadline", "malformed"):
                started = time.perf_counter()
                await self._stream(client, min(self._known, key=lambda one: one.ask.new_tokens), Said())
                self.findings.waits.setdefault(name, []).append(time.perf_counter() - started)
        except (FormError, RefusedError) as error:
            self.findings.fail(f"{name} of request {known.ask.number}: {type(error).__name__}: {error}")
        self.findings.counts[name] += 1

    async def _stream(self, client: httpx.AsyncClient, known: Known, said: Said) -> None:
        await stream(client, known.ask.body(self._served.name), said, tamper=self._tamper)
        self.findings.check(known, said, is_whole=True)

    async def _whole(self, client: httpx.AsyncClient, known: Known, said: Said) -> None:
        await ask(client, known.ask.body(self._served.name), said, self._tamper)
        self.findings.check(known, said, is_whole=True)

    async def _leave(self, client: httpx.AsyncClient, known: Known, said: Said) -> None:
        after = 1 + int(self._random.integers(max(known.ask.new_tokens // 4, 1)))
        await stream(client, known.ask.body(self._served.name), said, leave_after=after, tamper=self._tamper)
        self.findings.check(known, said, is_whole=said.reason is not None)

    async def _deadline(self, client: httpx.AsyncClient, known: Known, said: Said) -> None:
        seconds = float(self._random.exponential(_DEADLINE_S)) + 1e-3
        await stream(client, known.ask.body(self._served.name, timeout=seconds), said, tamper=self._tamper)
        is_late = said.reason == "timeout"
        self.findings.counts["deadline passed" if is_late else "deadline kept"] += 1
        self.findings.check(known, said, is_whole=not is_late)

    async def _malformed(self, client: httpx.AsyncClient, known: Known, said: Said) -> None:
        choices = malformed_of(known.ask, self._served.name, self._served.max_model_len)
        wrong = await wrong_reply(client, choices[int(self._random.integers(len(choices)))])
        if wrong is not None:
            self.findings.fail(wrong)
