"""Small chunks leave at once: connections of the server's socket have TCP_NODELAY."""

from __future__ import annotations

import asyncio
import socket

import pytest

from mtp_serving.openai.server import open_socket


def plain_socket(host: str, port: int) -> socket.socket:
    """As it is made without naming the protocol."""
    opened = socket.socket(socket.AF_INET)
    opened.bind((host, port))
    return opened


@pytest.mark.parametrize(("make", "expected"), [(open_socket, True), (plain_socket, False)])
def test_a_connection_does_not_wait_for_acknowledgements(make: object, expected: bool) -> None:
    """The plain socket is the control: asyncio looks at the protocol before it sets the option."""
    assert callable(make)
    listening = make("127.0.0.1", 0)

    async def found() -> bool:
        seen: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            seen.set_result(bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(connected, sock=listening)
        async with server:
            _, writer = await asyncio.open_connection(*listening.getsockname())
            result = await seen
            writer.close()
            await writer.wait_closed()
        return result

    assert asyncio.run(found()) is expected
