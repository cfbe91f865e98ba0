"""A server in a thread of this process, on a free port of the loopback interface."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from mtp_runtime import Model
from mtp_runtime.batching.options import BatchOptions
from mtp_serving.openai.options import ServeOptions
from mtp_serving.openai.server import Server, open_socket
from mtp_serving.openai.service import Service

NAME = "tiny"
PATIENCE = 60.0
"""Seconds after which a test gives up; none of them asserts a time."""


@dataclass
class Running:
    """A server that runs.

    Attributes:
        http: a client of it; every test that uses another one closes it.
    """

    url: str
    service: Service
    http: httpx.Client
    loop: asyncio.AbstractEventLoop
    server: Server
    clients: list[openai.OpenAI] = field(default_factory=list)

    def openai(self, **options: Any) -> openai.OpenAI:
        """The official client."""
        given = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        client = openai.OpenAI(**given)
        self.clients.append(client)
        return client

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """POST an object; the model is added."""
        body = {"model": NAME, **body} if isinstance(body, dict) else body
        return self.http.post(f"{self.url}{path}", json=body, **options)

    def metrics(self) -> dict[str, float]:
        """Every sample by name and labels, but for the model's."""
        found = {}
        for family in text_string_to_metric_families(self.http.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                assert sample.labels["model_name"] == self.service.options.name
                labels = ",".join(f"{key}={value}" for key, value in sample.labels.items() if key != "model_name")
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def stop(self) -> None:
        """As a signal would."""
        self.loop.call_soon_threadsafe(self.server.stop)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until something holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.005)


@contextmanager
def serving(
    model: Model, batch: BatchOptions | None = None, *, send_buffer: int | None = None, **options: Any
) -> Iterator[Running]:
    """Serve a model; behind the block nothing of it is left.

    send_buffer: bytes that the system holds for a client; it takes more by itself.
    """
    service = Service(model, ServeOptions(**{"name": NAME, **options}), batch)
    listening, started, made = open_socket("127.0.0.1", 0), threading.Event(), []
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)

    async def run() -> None:
        server = Server(service)
        made.append((asyncio.get_running_loop(), server))
        await server.run(listening, signals=False, ready=started.set)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="test-server")
    thread.start()
    assert started.wait(PATIENCE), "the server did not start"
    loop, server = made[0]
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with httpx.Client(timeout=PATIENCE) as http:
        running = Running(url, service, http, loop, server)
        try:
            yield running
        finally:
            for client in running.clients:
                client.close()
            if thread.is_alive():
                # Twice: what a failed test has left is given up.
                running.stop()
                running.stop()
            thread.join(PATIENCE)
    assert not thread.is_alive(), "the server did not end"
