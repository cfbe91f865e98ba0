"""The whole measurement against one server, by level of concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from mtp_tools.load.blocks import OFF, REQUEST_S, CpuClock, Level, Note, policies, run_level, seconds_alone
from mtp_tools.load.report import level_dict
from mtp_tools.load.traffic import Lengths, draw_asks

_WARM_UP = 3
_MORE_THAN_IT_DOES = 2.0
"""Requests arrive so much faster than they would be answered one by one by each of the places."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        concurrency: most requests under way, one level each.
        requests: of a block.
        blocks: rounds in which each policy answers the same requests.
        prompt, answer: lengths.
        draft_tokens: K of the fixed policy.
        rate: arrivals a second; None takes twice what one request after the other in each place would be.
        seed: of lengths, prompts and arrivals.
    """

    concurrency: Sequence[int]
    requests: int
    blocks: int
    prompt: Lengths
    answer: Lengths
    draft_tokens: int
    rate: float | None
    seed: int


async def measure(
    url: str, model: str | None, material: list[int], plan: Plan, note: Note, cpu_clock: CpuClock | None = None
) -> list[dict[str, Any]]:
    """Figures of every level.

    Args:
        url: of the server.
        model: what it calls its model; None asks it.
        material: token ids that prompts are cut from.
        plan: what to measure.
        note: told of progress.
        cpu_clock: processor time of the server in seconds.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    chosen = policies(plan.draft_tokens)
    async with client_of(url) as client:
        model = model or (await served_by(client)).name
        warm = draw_asks(material, _WARM_UP, plan.prompt, plan.answer, plan.seed)
        alone = {name: await seconds_alone(client, model, warm, options) for name, options in chosen.items()}
        note(f"warm-up is done, {alone[OFF]:.3f} s a request")
        levels = []
        for concurrency in plan.concurrency:
            rate = plan.rate or _MORE_THAN_IT_DOES * concurrency / alone[OFF]
            level = Level(concurrency, rate)
            rounds = [
                draw_asks(material, plan.requests, plan.prompt, plan.answer, plan.seed + 1 + number)
                for number in range(plan.blocks)
            ]
            levels.append(level_dict(level, await run_level(client, model, rounds, level, chosen, note, cpu_clock)))
        return levels


def client_of(url: str) -> httpx.AsyncClient:
    """A client of one server, without proxies, with a connection for each request under way."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(REQUEST_S), limits=limits, trust_env=False)


@dataclass(frozen=True)
class Served:
    """What the server calls its model, and most tokens of a prompt and its answer."""

    name: str
    max_model_len: int


async def served_by(client: httpx.AsyncClient) -> Served:
    """The model of a server.

    Raises:
        httpx.HTTPError: it does not answer.
    """
    response = await client.get("/v1/models")
    response.raise_for_status()
    (model,) = response.json()["data"]
    return Served(str(model["id"]), int(model["max_model_len"]))
