"""Requests that nobody can answer, and the status that each of them deserves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx

from mtp_tools.load.traffic import Ask


@dataclass(frozen=True)
class Malformed:
    """A request and the statuses that are a right answer to it."""

    name: str
    content: bytes
    statuses: tuple[int, ...] = (400,)
    method: str = "POST"
    path: str = "/v1/completions"


def malformed_of(ask: Ask, model: str, max_model_len: int) -> list[Malformed]:
    """Made of a good request, one fault each; `max_model_len` is that of the bundle."""

    def changed(name: str, **fields: Any) -> Malformed:
        return Malformed(name, json.dumps(ask.body(model, **fields)).encode())

    good = json.dumps(ask.body(model)).encode()
    return [
        Malformed("half a body", good[: len(good) // 2]),
        Malformed("no JSON", b"\xff\xfe{"),
        Malformed("no object", b"[1, 2]"),
        Malformed("nothing", b""),
        Malformed("no prompt", json.dumps({"model": model}).encode()),
        changed("an unknown field", temprature=1),
        changed("a wrong type", max_tokens="many"),
        changed("a negative length", max_tokens=-1),
        changed("ids beyond the vocabulary", prompt=[1 << 40]),
        changed("a longer prompt than fits", prompt=[1] * (max_model_len + 1)),
        changed("K beyond the limit", draft_tokens=1000),
        changed("a temperature below zero", temperature=-1.0),
        Malformed("another model", json.dumps(ask.body("another")).encode(), (404,)),
        Malformed("another path", good, (404,), path="/v1/nothing"),
        Malformed("another method", b"", (405,), "GET"),
    ]


async def wrong_reply(client: httpx.AsyncClient, one: Malformed) -> str | None:
    """What is wrong with the server's reply to it; None if nothing is."""
    headers = {"content-type": "application/json"}
    response = await client.request(one.method, one.path, content=one.content, headers=headers)
    if response.status_code not in one.statuses:
        return f"{one.name}: status {response.status_code}, expected {' or '.join(map(str, one.statuses))}"
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{one.name}: {response.content[:80]!r} is no error of this interface"
    return None if message else f"{one.name}: an error without a sentence"
