"""Reads an answer of the server, streamed or whole, and is strict about its form."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Clock = Callable[[], float]
Tamper = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


class FormError(Exception):
    """The response is none that this interface may give."""


class RefusedError(Exception):
    """The server answered with an error of its own."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"status {status}: {_message(body)}")
        self.status, self.body = status, body


@dataclass
class Said:
    """What came of one answer.

    Attributes:
        identity: id of the response.
        token_ids, text: of all chunks.
        reason: why it ended, in the server's own words; None if it has not ended.
        chunks: when each chunk with tokens came, and how many it had.
        usage: tokens as the server counts them.
        stats: speculative statistics.
        is_checked: somebody has compared it with what was expected.
    """

    identity: str | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None
    is_checked: bool = False

    def add(self, chunk: dict[str, Any], now: float) -> None:
        """One chunk of a stream.

        Raises:
            FormError: it may not come here.
        """
        if "error" in chunk:
            raise FormError(f"an error within a stream: {chunk['error']}")
        if self.identity not in (None, chunk["id"]):
            raise FormError(f"a stream has two ids, {self.identity} and {chunk['id']}")
        self.identity = chunk["id"]
        self.usage = chunk.get("usage") or self.usage
        self.stats = chunk.get("speculative_stats") or self.stats
        for choice in chunk["choices"]:
            if self.reason is not None:
                raise FormError("a chunk of an answer that had ended")
            ids = choice.get("token_ids", [])
            self.token_ids += ids
            self.text += choice["text"]
            if ids:
                self.chunks.append((now, len(ids)))
            if choice.get("finish_reason") is not None:
                self.reason = choice["stop_reason"]


async def stream(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    said: Said,
    *,
    leave_after: int | None = None,
    tamper: Tamper | None = None,
    clock: Clock = time.perf_counter,
) -> None:
    """Ask for a stream and read it to its end.

    Args:
        client: with the server's address.
        body: of POST /v1/completions.
        said: takes what comes, so that it is there after an exception too.
        leave_after: chunks after which the connection is closed; None reads all.
        tamper: makes of a chunk those that are read in its place: a fault of the server, for controls.
        clock: in seconds.

    Raises:
        RefusedError: the server refused.
        FormError: lines are lost or doubled, or are no chunks.
        httpx.TransportError: the connection broke.
    """
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}, "speculative_stats": True}
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        if response.status_code != 200:
            raise RefusedError(response.status_code, _json(await response.aread()))
        chunks, is_over = 0, False
        async for data in _events(response):
            if is_over:
                raise FormError("an event behind [DONE]")
            if data == "[DONE]":
                is_over = True
                continue
            read = [_json(data)]
            for chunk in read if tamper is None else tamper(read):
                said.add(chunk, clock())
            chunks += 1
            if chunks == leave_after:
                return
    if not is_over:
        raise FormError("a stream without [DONE]")
    _require_whole(said)


async def ask(client: httpx.AsyncClient, body: dict[str, Any], said: Said, tamper: Tamper | None = None) -> None:
    """Ask for an answer in one piece; raises as `stream`."""
    response = await client.post("/v1/completions", json={**body, "speculative_stats": True})
    if response.status_code != 200:
        raise RefusedError(response.status_code, _json(response.content))
    read = [_json(response.content)]
    for whole in read if tamper is None else tamper(read):
        said.add(whole, time.perf_counter())
    _require_whole(said)


def _require_whole(said: Said) -> None:
    if said.reason is None:
        raise FormError("an answer without a reason for its end")
    counted = None if said.usage is None else said.usage["completion_tokens"]
    if counted != len(said.token_ids):
        raise FormError(f"{len(said.token_ids)} tokens came, and the usage says {counted}")


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """Data of the server-sent events, each of which is one line and a blank one."""
    before: str | None = None
    async for line in response.aiter_lines():
        if line:
            if before is not None or not line.startswith("data: "):
                raise FormError(f"a line that is no event: {line[:80]!r}")
            before = line[len("data: ") :]
        elif before is None:
            raise FormError("a blank line that ends no event")
        else:
            yield before
            before = None
    if before is not None:
        raise FormError(f"a stream that ends within an event: {before[:80]!r}")


def _json(data: str | bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise FormError(f"no JSON: {data[:80]!r}") from error


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else str(body)[:200]
