"""llama.cpp: its own server, one for each K, asked for token ids over HTTP."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

_START_S = 300
_MTP = ("--spec-type", "draft-mtp", "--spec-draft-p-min", "0")


class Engine:
    """A server for each K, since a request cannot choose K; those with drafts are left out if they do not come up."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._servers = {0: Server(settings, ())}
        self.about = {"llama.cpp from": settings["release"]}
        try:
            for width in settings["draft_tokens"]:
                self._servers[width] = Server(settings, (*_MTP, "--spec-draft-n-max", str(width)))
        except RuntimeError as error:
            self.about["MTP"] = f"does not run: {error}"
        self.draft_tokens = tuple(self._servers)
        self.processes: tuple[int, ...] = ()

    def answer(self, prompt: list[int], new_tokens: int, draft_tokens: int) -> dict[str, Any]:
        """From the server of this K; the time of the first token is the server's own."""
        server = self._servers[draft_tokens]
        self.processes = (server.process.pid,)
        asked = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        start = time.perf_counter()
        found = server.post(asked)
        total = time.perf_counter() - start
        timings = found["timings"]
        reply = {"ids": found["tokens"], "first_s": timings["prompt_ms"] / 1e3, "total_s": total}
        if draft_tokens:
            reply |= {"drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)}
        return reply


class Server:
    """One llama-server on a free port of this machine; it ends with this process."""

    def __init__(self, settings: dict[str, Any], options: tuple[str, ...]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        threads = str(settings["threads"])
        command = [settings["server"], "-m", settings["model"], "-c", str(settings["max_model_len"]), "-np", "1"]
        command += ["-t", threads, "-tb", threads, "--host", "127.0.0.1", "--port", str(port), "--no-warmup", *options]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        atexit.register(self.process.kill)
        deadline = time.monotonic() + _START_S
        while not self._healthy():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server {' '.join(options)} ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"llama-server {' '.join(options)} was not ready after {_START_S} s")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def post(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer to one completion."""
        data = json.dumps(asked).encode()
        request = urllib.request.Request(f"{self._url}/completion", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            found: dict[str, Any] = json.loads(reply.read())
        return found


def load(settings: dict[str, Any]) -> Engine:
    """Settings: server (the program), release, model, max_model_len, draft_tokens, threads."""
    return Engine(settings)
