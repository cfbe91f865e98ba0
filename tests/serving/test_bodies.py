"""Bodies that do not come, or not in time; and connections of which a client closes its half."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mtp_runtime import Model
from mtp_serving.openai.gate import Gate
from tests.serving.server import NAME, PATIENCE, Running, serving

BODY = json.dumps({"model": NAME, "prompt": "A", "max_tokens": 4, "temperature": 0, "ignore_eos": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WITH_LENGTH = HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode()
IN_CHUNKS = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@contextmanager
def connected(server: Running) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as connection:
        yield connection


def everything(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


@contextmanager
def trickling(connection: socket.socket, part: Callable[[], bytes]) -> Iterator[None]:
    """Meanwhile a part goes out now and then, far too seldom for all of it to come in time."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.05):
            try:
                connection.sendall(part())
            except OSError:
                return  # The server has closed it, which is what is waited for.

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE)


@pytest.mark.parametrize(("head", "part"), [(WITH_LENGTH, b" "), (IN_CHUNKS, b"1\r\n \r\n")])
def test_a_body_that_does_not_come_in_time_is_refused_and_its_connection_closed(
    carried: Model, head: bytes, part: bytes
) -> None:
    with serving(carried, body_timeout=0.5) as server:
        with connected(server) as connection:
            connection.sendall(head)
            with trickling(connection, lambda: part):
                received = everything(connection)
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"did not come within 0.5 seconds" in received
        assert b". Send it faster." in received, "two sentences, each with its capital"
        assert b"connection: close" in received.lower()
        assert server.post("/v1/completions", json.loads(BODY)).status_code == 200


def held(server: Running, monkeypatch: pytest.MonkeyPatch, seconds: float) -> threading.Event:
    """Requests whose body has come wait for this, so long at most."""
    free, submit = threading.Event(), server.service._submit

    def waiting(*given: Any) -> None:
        free.wait(seconds)
        submit(*given)

    monkeypatch.setattr(server.service, "_submit", waiting)
    return free


def test_the_limit_ends_with_the_body(carried: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may take as long as it wants."""
    with serving(carried, body_timeout=0.2) as server:
        held(server, monkeypatch, 0.6)
        response = server.post("/v1/completions", json.loads(BODY))
        assert response.status_code == 200, response.text


def test_control_without_the_limit_a_trickling_body_keeps_its_connection(
    carried: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "_counted", lambda self, receive: receive)
    with serving(carried, body_timeout=0.1) as server, connected(server) as connection:
        connection.sendall(WITH_LENGTH)
        connection.settimeout(1.0)
        with trickling(connection, lambda: b""), pytest.raises(TimeoutError):
            everything(connection)


def test_a_client_that_closes_its_half_counts_as_one_that_has_gone(
    carried: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of what it sends is all that tells the server of a client that went."""
    with serving(carried) as server:
        free = held(server, monkeypatch, PATIENCE)
        with connected(server) as connection:
            connection.sendall(WITH_LENGTH + BODY)
            connection.shutdown(socket.SHUT_WR)
            assert everything(connection) == b""
        free.set()
        with connected(server) as connection:
            connection.sendall(WITH_LENGTH.replace(b"Host: x", b"Host: x\r\nConnection: close") + BODY)
            assert b'"finish_reason":"length"' in everything(connection), "control: with both halves it has its answer"
