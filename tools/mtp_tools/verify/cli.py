"""The command `mtp-run verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtp_engines.bundle import open_bundle
from mtp_runtime.api import load
from mtp_runtime.cli import find_bundle
from mtp_tools.verify.checks import Line, checks


def verify(
    bundle: Annotated[
        Path | None, typer.Argument(help="Bundle directory.  [default: the only one in bundles/]")
    ] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens of each compared run.", min=2)] = 32,
    long_tokens: Annotated[int, typer.Option("--long-tokens", help="Tokens of the long generation.", min=2)] = 256,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print failures and the verdict only.")] = False,
    threads: Annotated[int, typer.Option("--threads", help="Threads; 0 takes one a physical core.")] = 0,
) -> int:
    """Prove that speculation changes nothing: tokens for every K, and every state after every cycle, bit by bit."""
    directory = find_bundle(bundle)
    open_bundle(directory, thorough=True)
    model = load(directory, threads)
    total, failed = 0, []
    for line in checks(model, new_tokens, long_tokens):
        total += 1
        if not line.holds:
            failed.append(line)
        if not (quiet and line.holds):
            print(_shown(line), flush=True)
    verdict = "lossless" if not failed else f"NOT lossless: {len(failed)} failed"
    print(f"{directory}: {verdict}, {total} checks, K = 0..{model.manifest.limits.max_draft_tokens}")
    return 1 if failed else 0


def _shown(line: Line) -> str:
    return f"{'ok  ' if line.holds else 'FAIL'} {line.text}"
