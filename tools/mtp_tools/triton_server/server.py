"""Runs a server over a model repository, on free ports of the loopback interface, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from mtp_tools.triton_server.fetch import Installation, ServerError

_EXIT_S = 5
_STUB = "triton_python_backend_stub"
_SHARED = Path("/dev/shm")


class Server:
    """A running server.

    Attributes:
        process: the server itself.
        http, grpc, metrics: ports.
        log: what it and its models print.
    """

    def __init__(self, installation: Installation, repository: Path, log: Path) -> None:
        """Starts it; see `wait`."""
        self.http, self.grpc, self.metrics = _free_ports(3)
        self.log = log
        self._stubs: dict[int, list[str]] = {}
        options = {
            "model-repository": repository,
            "backend-directory": installation.backends,
            "exit-timeout-secs": _EXIT_S,
        }
        for name in ("http", "grpc", "metrics"):
            options |= {f"{name}-address": "127.0.0.1", f"{name}-port": getattr(self, name)}
        environment = {
            **os.environ,
            "PATH": f"{installation.interpreter / 'bin'}:{os.environ['PATH']}",
            # The system's libpython may be of another patch level than the interpreter's standard library.
            "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(installation.program), *(f"--{name}={value}" for name, value in options.items())],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self, timeout_s: float = 60) -> None:
        """Wait until every model is loaded.

        Raises:
            ServerError: it ended, or is not ready in time; with what it says is wrong.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ServerError(f"the server ended with {self.process.returncode}: {self._complaint()}")
            if self._is_ready():
                self._look_for_stubs()
                return
            time.sleep(0.05)
        raise ServerError(f"the server was not ready in {timeout_s} seconds: {self._complaint()}")

    def stop(self, *, kill: bool = False) -> None:
        """End it, and what it may leave behind: processes of models, and their shared memory."""
        if self.process.poll() is None:
            self._look_for_stubs()
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
            try:
                self.process.wait(2 * _EXIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid, command in self._stubs.items():
            if _command_of(pid) == command:
                os.kill(pid, signal.SIGKILL)
            for word in command:
                if word.startswith("triton_python_backend_shm_region_"):
                    (_SHARED / word).unlink(missing_ok=True)

    @property
    def stubs(self) -> list[int]:
        """Processes that run models."""
        self._look_for_stubs()
        return [pid for pid, command in self._stubs.items() if _command_of(pid) == command]

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/health/ready", timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _look_for_stubs(self) -> None:
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in map(int, task.read_text().split()):
                    command = _command_of(pid)
                    if command and command[0].endswith(_STUB):
                        self._stubs[pid] = command

    def _complaint(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        # An error begins with E and a date; what follows in quotes may have several lines, written as \\n.
        return " ".join([line for line in lines if re.match(r"E\d{4} |error:", line)][-3:]) or "it says nothing"


@contextlib.contextmanager
def running(installation: Installation, repository: Path, log: Path, timeout_s: float = 60) -> Iterator[Server]:
    """A server that is ready, and is ended with the block.

    Raises:
        ServerError: it does not start.
    """
    server = Server(installation, repository, log)
    try:
        server.wait(timeout_s)
        yield server
    finally:
        server.stop()


def _command_of(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    return []


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
