"""The command `python -m mtp_tools.triton_server`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from mtp_engines.command import run_command
from mtp_tools.triton_server.fetch import fetch
from mtp_tools.triton_server.server import running


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mtp-export" / "triton-server"


@click.command("triton_server")
@click.argument("repository", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--cache", type=click.Path(path_type=Path), help="Where the server is kept.  [default: the user's cache]")
def serve(repository: Path, cache: Path | None) -> None:
    """Serve a model repository on this machine's CPU until interrupted; downloads the server the first time."""
    installation = fetch(cache or _cache())
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "server.log"
        with running(installation, repository, log) as server:
            print(f"HTTP     http://127.0.0.1:{server.http}")
            print(f"gRPC     127.0.0.1:{server.grpc}")
            print(f"metrics  http://127.0.0.1:{server.metrics}/metrics", flush=True)
            server.process.wait()


def main() -> None:
    """Entry point."""
    sys.exit(run_command(serve))
