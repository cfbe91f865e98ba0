"""The command `mtp-run verify`."""

from __future__ import annotations

from pathlib import Path

import click

from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import open_bundle
from mtp_engines.errors import RequestError
from mtp_runtime.api import Model
from mtp_runtime.cli import bundle_argument, engine_options, find_bundle, open_model
from mtp_tools.verify.checks import Line, checks
from mtp_tools.verify.settle import Precision


@click.command()
@bundle_argument
@click.option(
    "--new-tokens", type=click.IntRange(min=2), default=32, show_default=True, help="Tokens of each compared run."
)
@click.option(
    "--long-tokens", type=click.IntRange(min=2), default=256, show_default=True, help="Tokens of the long generation."
)
@click.option("--quiet", is_flag=True, help="Print failures, near ties and the verdict only.")
@engine_options
def verify(bundle: Path | None, new_tokens: int, long_tokens: int, quiet: bool, engine: EngineOptions) -> int:
    """Prove that speculation changes nothing: tokens for every K, and every state after every cycle, bit by bit.

    On a backend that is only near-tie, differences that are rounding are settled as such.
    """
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
    lines: list[Line] = []
    for line in checks(model, new_tokens, long_tokens, _precision(model, engine)):
        lines.append(line)
        if not (quiet and line.holds and not line.near_ties):
            print(_shown(line), flush=True)
    print(f"{directory}: {_verdict(lines, model.engine.numerics, limits.max_draft_tokens)}")
    return 0 if all(line.holds for line in lines) else 1


def _verdict(lines: list[Line], promise: str, most: int) -> str:
    """The last line: what holds on an engine that promises `exact` or `near-tie`."""
    failed = sum(not line.holds for line in lines)
    counted = f"{len(lines)} checks, K = 0..{most}"
    if failed:
        return f"NOT lossless: {failed} failed, {counted}"
    if promise == "exact":
        return f"lossless, {counted}"
    ties, rounded = sum(line.near_ties for line in lines), sum(line.is_rounded for line in lines)
    return (
        f"near-tie: {counted}, {rounded} differ by rounding, {ties} near ties settled, none beyond; use --verify step "
        "for exactness"
    )


def _precision(model: Model, options: EngineOptions) -> Precision:
    """The type that the engine computes in; the coarsest one on a device for which the bundle says nothing."""
    manifest, device = model.manifest, "cpu" if model.engine.runs_on == "cpu" else "cuda"
    build = manifest.backends.get(f"{options.backend or manifest.backend}-{device}")
    if build is not None:
        return build.precision
    return "fp32" if device == "cpu" else "bf16"


def _shown(line: Line) -> str:
    return f"{'tie ' if line.holds and line.near_ties else 'ok  ' if line.holds else 'FAIL'} {line.text}"
