"""A server of our own, started and ended by its process id; and which addresses may be loaded."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from mtp_engines.errors import MtpError, RequestError

_READY_S, _END_S = 600.0, 60.0


class ServerError(MtpError):
    """The server did not do what it was started for."""


class ServerProcess:
    """`mtp-run serve` on a free port of this machine, which may be killed and started again."""

    def __init__(self, bundle: Path, arguments: Sequence[str], log: Path) -> None:
        """Nothing runs yet; what it writes to stderr goes to the end of `log`."""
        program = Path(sys.executable).with_name("mtp-run")
        self._command = [str(program), "serve", str(bundle), "--port", "0", "--quiet", *arguments]
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs."""
        assert self._process is not None, "it was not started"
        return self._process.pid

    def start(self) -> str:
        """Start it and wait until it takes connections; its address.

        Raises:
            ServerError: it ended, or was not ready in time.
        """
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        with self._log.open("a", encoding="utf-8") as errors:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._process = process
        # Read to the end, so that the server never waits for somebody to take its output.
        threading.Thread(target=_read_all, args=(process, lines), daemon=True).start()
        try:
            line = lines.get(timeout=_READY_S)
        except queue.Empty:
            self.kill()
            raise ServerError(f"the server was not ready within {_READY_S:.0f} s; see {self._log}.") from None
        address = next((word.rstrip(",") for word in line.split() if word.startswith("http://")), None)
        if address is None:
            self.kill()
            raise ServerError(f"the server ended before it was ready; {self._log} has the reason.")
        return address

    def rss_bytes(self) -> int | None:
        """Memory that it has in use; None once it has ended."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self) -> float:
        """Processor time that it has used, of all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        """End it without a warning."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        """Ask it to end and wait; its exit code.

        Raises:
            ServerError: it did not end in time, and was killed.
        """
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"the server did not end within {_END_S:.0f} s of SIGTERM; see {self._log}.") from None


@contextlib.contextmanager
def running(server: ServerProcess) -> Iterator[str]:
    """The address of a server that runs within the block, and never behind it."""
    try:
        yield server.start()
    finally:
        server.kill()


def require_loopback(url: str, *, allow_remote: bool) -> None:
    """Refuse to load other machines.

    Raises:
        RequestError: the address is none, or is not of this machine.
    """
    host = urlsplit(url).hostname
    if urlsplit(url).scheme not in ("http", "https") or not host:
        raise RequestError(f"{url!r} is no address of a server; give one such as http://127.0.0.1:8000.")
    if not (allow_remote or is_loopback(host)):
        raise RequestError(
            f"{host} is not this machine, and a load is a burden on others; give an address of the loopback interface, "
            "or --allow-remote if the server is yours."
        )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its address, or is called localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_all(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put("")
