"""Clients that go, and clients that are slow: their slot is free at once, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtp_runtime import Model
from mtp_runtime.batching.options import BatchOptions
from mtp_runtime.events import Emitted, Finished
from mtp_runtime.stats import Stats
from mtp_serving.openai.answers import Answers
from tests.serving.server import NAME, Running, serving, wait_until

TEXT = "/v1/completions"
LONG = {"prompt": "A", "max_tokens": 240, "ignore_eos": True, "temperature": 0, "draft_tokens": 3}


def opened(server: Running, body: dict[str, Any], receive_bytes: int = 0) -> socket.socket:
    """A connection whose request was sent; the caller closes it."""
    content = json.dumps({"model": NAME, **body}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


def slow_rounds(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Tokens that answers have said, one entry a round; each round waits a little, as those of a large model do."""
    generated: list[float] = []
    metrics = server.service.metrics
    emitted = metrics.emitted

    def counting(ticket: Any, event: Emitted) -> None:
        emitted(ticket, event)
        generated.append(len(event.token_ids))
        time.sleep(0.02)

    monkeypatch.setattr(metrics, "emitted", counting)
    return generated


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_slot_within_a_round(
    carried: Model, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serving(carried, BatchOptions(slots=1, prefix_bytes=0)) as server:
        generated = slow_rounds(server, monkeypatch)
        connection = opened(server, {**LONG, "stream": stream})
        wait_until(lambda: len(generated) >= 5, "it has said something")
        assert server.metrics()["mtp:num_requests_running"] == 1
        connection.close()
        wait_until(lambda: server.service.scheduler.running == 0, "the slot is free")
        metrics = server.metrics()
        assert metrics["mtp:request_success_total{finished_reason=abort}"] == 1
        assert metrics["mtp:generation_tokens_total"] == sum(generated) < LONG["max_tokens"]  # type: ignore[operator]
        assert metrics["mtp:num_requests_running"] == metrics["mtp:num_requests_waiting"] == 0
        wait_until(lambda: server.service.under_way == 0, "the request is over")
        again = server.post(TEXT, {**LONG, "max_tokens": 8}).json()
        expected = carried.complete(prompt="A", max_new_tokens=8, ignore_eos=True)
        assert again["choices"][0]["text"] == expected.text
        assert server.metrics()["mtp:generation_tokens_total"] == sum(generated), "nothing came behind it"


def test_control_without_the_cancel_the_slot_stays_busy(carried: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answers, "cancel", lambda self: None)
    with serving(carried, BatchOptions(slots=1, prefix_bytes=0)) as server:
        generated = slow_rounds(server, monkeypatch)
        connection = opened(server, {**LONG, "stream": True})
        wait_until(lambda: len(generated) >= 5, "it has said something")
        connection.close()
        wait_until(lambda: server.service.under_way == 0, "the request is over")
        assert server.metrics()["mtp:num_requests_running"] == 1
        wait_until(lambda: server.service.scheduler.running == 0, "it has run to its end")
        assert sum(generated) == LONG["max_tokens"]


def test_a_client_that_goes_while_it_waits_never_gets_a_slot(carried: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(carried, BatchOptions(slots=1, prefix_bytes=0)) as server:
        generated = slow_rounds(server, monkeypatch)
        first = opened(server, {**LONG, "stream": True})
        wait_until(lambda: len(generated) >= 2, "it runs")
        second = opened(server, {**LONG, "prompt": "B"})
        wait_until(lambda: server.service.scheduler.queued == 1, "the other one waits")
        second.close()
        wait_until(lambda: server.service.scheduler.queued == 0, "it waits no more")
        first.close()
        wait_until(lambda: server.service.scheduler.running == 0, "the slot is free")
        assert server.metrics()["mtp:request_success_total{finished_reason=abort}"] == 2
        assert server.metrics()["mtp:time_to_first_token_seconds_count"] == 1


def test_a_slow_reader_stalls_nobody_and_is_given_up(carried: Model) -> None:
    """Log-probabilities make its stream far larger than what sockets hold."""
    with serving(carried, BatchOptions(prefix_bytes=0), send_timeout=0.5, send_buffer=4096) as server:
        wide = {**LONG, "n": 4, "temperature": 1.0, "logprobs": 20, "stream": True}
        slow = opened(server, wide, receive_bytes=4096)
        wait_until(lambda: server.service.under_way == 1, "it has begun")
        others = [server.post(TEXT, {**LONG, "max_tokens": 12}).json()["choices"][0]["text"] for _ in range(3)]
        expected = carried.complete(prompt="A", max_new_tokens=12, ignore_eos=True).text
        assert others == [expected] * 3
        wait_until(lambda: server.service.under_way == 0, "the slow one is given up")
        wait_until(lambda: server.service.scheduler.running == 0, "its slots are free")
        received = b""
        slow.settimeout(10)
        while part := slow.recv(65536):
            received += part
        slow.close()
        assert b"[DONE]" not in received, "control: it was too slow to get all of it"


def test_what_a_slow_reader_has_not_taken_is_one_event_an_answer() -> None:
    async def run() -> list[tuple[int, Any]]:
        answers = Answers(1, 1)
        tell = answers.listener(0)
        for number in range(1000):
            tell(Emitted((number,), "x"))
        tell(Finished(tuple(range(1000)), "x" * 1000, "length", 1, Stats()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(answers._kept) == 1
        return [pair async for pair in answers.events()]

    (_, emitted), (_, finished) = asyncio.run(run())
    assert (emitted.token_ids, emitted.text) == (finished.token_ids, finished.text)


def test_clients_that_go_in_the_middle_of_a_burst_leave_the_others_alone(carried: Model) -> None:
    """SV-10: prompts of different ids, so that another one's answer would be seen."""
    draw = random.Random(1)
    expected = {
        token: list(carried.complete(prompt_ids=[token] * 3, max_new_tokens=16, ignore_eos=True).token_ids)
        for token in range(100, 112)
    }
    assert len(set(map(tuple, expected.values()))) > 6, "control: the answers differ"

    def ask(server: Running, token: int) -> list[int]:
        body = {**LONG, "prompt": [token] * 3, "max_tokens": 16, "return_token_ids": True}
        return list(server.post(TEXT, body).json()["choices"][0]["token_ids"])

    with serving(carried, BatchOptions(prefix_bytes=1 << 22)) as server, ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            tokens = draw.sample(sorted(expected), 8)
            jobs = [pool.submit(ask, server, token) for token in tokens]
            aborted = [opened(server, {**LONG, "prompt": [token] * 3, "stream": True}) for token in tokens[:4]]
            for connection in aborted:
                time.sleep(draw.uniform(0, 0.05))
                connection.close()
            assert [job.result() for job in jobs] == [expected[token] for token in tokens]
            single = draw.choice(sorted(expected))
            assert ask(server, single) == expected[single]
        scheduler = server.service.scheduler
        wait_until(lambda: server.service.under_way == scheduler.running == scheduler.queued == 0, "all are over")
        assert server.metrics()["mtp:prefix_cache_bytes"] <= 1 << 22
