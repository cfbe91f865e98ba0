"""The command `mtp-run verify`."""

from __future__ import annotations

from pathlib import Path

import click

from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import open_bundle
from mtp_engines.errors import RequestError
from mtp_runtime.cli import bundle_argument, engine_options, find_bundle, open_model
from mtp_tools.verify.checks import Line, checks


@click.command()
@bundle_argument
@click.option(
    "--new-tokens", type=click.IntRange(min=2), default=32, show_default=True, help="Tokens of each compared run."
)
@click.option(
    "--long-tokens", type=click.IntRange(min=2), default=256, show_default=True, help="Tokens of the long generation."
)
@click.option("--quiet", is_flag=True, help="Print failures and the verdict only.")
@engine_options
def verify(bundle: Path | None, new_tokens: int, long_tokens: int, quiet: bool, engine: EngineOptions) -> int:
    """Prove that speculation changes nothing: tokens for every K, and every state after every cycle, bit by bit."""
    directory = find_bundle(bundle)
    limits = open_bundle(directory, thorough=True).manifest.limits
    least = limits.max_draft_tokens + 2
    if new_tokens < least:
        raise RequestError(
            f"--new-tokens is {new_tokens}; to accept all of {least - 2} drafts once takes at least {least}. Raise it."
        )
    if limits.max_model_len <= least:
        raise RequestError(
            f"{directory} holds {limits.max_model_len} tokens, too few to accept all of {least - 2} drafts once. Build "
            f"it with a --max-model-len of at least {least + 1}, or with a smaller --draft-tokens."
        )
    model = open_model(directory, engine)
    total, failed = 0, []
    for line in checks(model, new_tokens, long_tokens):
        total += 1
        if not line.holds:
            failed.append(line)
        if not (quiet and line.holds):
            print(_shown(line), flush=True)
    verdict = "lossless" if not failed else f"NOT lossless: {len(failed)} failed"
    print(f"{directory}: {verdict}, {total} checks, K = 0..{limits.max_draft_tokens}")
    return 1 if failed else 0


def _shown(line: Line) -> str:
    return f"{'ok  ' if line.holds else 'FAIL'} {line.text}"
