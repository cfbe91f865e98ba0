"""Runs an application until a signal, and lets what is under way come to its end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from mtp_engines.errors import RequestError
from mtp_serving.openai.app import create_app
from mtp_serving.openai.service import Service

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LAST_SECONDS = 5
"""For clients that are slow to take what was sent, once nothing more is made."""
_IDLE_SECONDS = 75
"""Longer than the balancers in front of it keep a connection, which they would find closed otherwise."""
_POLL_SECONDS = 0.05


def open_socket(host: str, port: int) -> socket.socket:
    """A socket with its address, which takes no connections yet; port 0 takes a free one.

    Raises:
        RequestError: the address is not there, or taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; without it, chunks of a kept connection wait 40 ms for an ACK.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except OSError as error:
        opened.close()
        reason = error.strerror or str(error)
        raise RequestError(
            f"cannot listen on {host} port {port}: {reason}. Choose another --host or --port."
        ) from error
    return opened


class Server:
    """One service behind one socket.

    The first signal drains: no request is taken, readiness is refused, and the process ends when the last answer was
    fetched. The second one gives up what is left.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
        self._server = _Uvicorn(config)
        self._stops = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self, listening: socket.socket, *, signals: bool = True, ready: Callable[[], None] = lambda: None
    ) -> None:
        """Serve until `stop` was called; closes the socket and the service.

        Args:
            listening: see `open_socket`.
            signals: whether SIGTERM and SIGINT stop it; needs the main thread.
            ready: called once connections are taken.
        """
        loop = asyncio.get_running_loop()
        for number in _SIGNALS if signals else ():
            loop.add_signal_handler(number, self.stop)
        try:
            serving = asyncio.create_task(self._server.serve([listening]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(_POLL_SECONDS)
            ready()
            await serving
        finally:
            for number in _SIGNALS if signals else ():
                loop.remove_signal_handler(number)
            await asyncio.to_thread(self._service.close, drain=False)

    def stop(self) -> None:
        """Drain; called again, give up what is left. In the event loop."""
        self._stops += 1
        self._service.draining = True
        task = asyncio.get_running_loop().create_task(self._end(drain=self._stops == 1))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, *, drain: bool) -> None:
        await asyncio.to_thread(self._service.close, drain=drain)
        while drain and self._service.under_way and self._stops == 1:
            await asyncio.sleep(_POLL_SECONDS)
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `Server`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
