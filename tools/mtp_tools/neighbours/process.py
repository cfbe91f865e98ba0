"""A worker as a process: started, asked, and known to be dead when it is."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtp_tools.neighbours.protocol import NeighbourError, Question, Ready, Reply, ready_from, reply_from

START_S, ANSWER_S = 1200.0, 900.0
_END_S = 10.0
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class DeadError(NeighbourError):
    """The worker has ended or does not answer, so it cannot be asked again."""


class Worker:
    """One worker; its stderr goes to a file."""

    def __init__(self, command: Sequence[str], log: Path, threads: int) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log, self._lines = log, queue.Queue[str | None]()
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= dict.fromkeys(_THREADS, str(threads))
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=environment,
                # A group of its own, so that a server that it started can be ended with it.
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, settings: dict[str, Any], seconds: float = START_S) -> Ready:
        """Let it load its model.

        Raises:
            NeighbourError: it reports an error.
            DeadError: it ended, or was not ready in time.
        """
        return ready_from(self._exchange(settings, seconds))

    def ask(self, question: Question, seconds: float = ANSWER_S) -> Reply:
        """One answer; nothing else computes meanwhile.

        Raises:
            NeighbourError: it reports an error, or figures that make no sense.
            DeadError: it ended, or did not answer in time.
        """
        return reply_from(self._exchange(question.as_dict(), seconds), question)

    def close(self) -> None:
        """End it, with whatever it started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # It may have ended with a line of ours unread.
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._kill()
        self._reader.join(_END_S)
        self._process.stdout.close()

    def _exchange(self, line: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
            found = self._lines.get(timeout=seconds)
        except OSError:
            found = None
        except queue.Empty:
            self._kill()
            raise DeadError(f"it did not answer within {seconds:.0f} s; see {self._log}.") from None
        if found is None:
            code = self._process.wait()
            raise DeadError(f"it ended with {code}: {self._last_words()} ({self._log} has the rest).")
        try:
            reply: dict[str, Any] = json.loads(found)
        except json.JSONDecodeError as error:
            raise NeighbourError(f"it answered {found[:80]!r}, which is no JSON.") from error
        return reply

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"
