"""The command `mtp-run acceptance`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from mtp_engines.backends.options import EngineOptions
from mtp_runtime.api import Model
from mtp_runtime.cli import bundle_argument, engine_options, open_model, requests_from_file
from mtp_runtime.drafters.registry import DRAFTERS
from mtp_runtime.request import Request
from mtp_runtime.stats import Stats, merge

_HEADER = (
    "| answer | K | drafted | accepted | acceptance | by position | emitted a cycle |\n|---|---|---|---|---|---|---|"
)


@click.command()
@bundle_argument
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="File with one JSON object a line.")
@click.option("--burst", type=click.IntRange(min=2), default=12, show_default=True, help="Tokens of a short answer.")
@click.option("--run", type=click.IntRange(min=2), default=96, show_default=True, help="Tokens of a long answer.")
@click.option("--draft-tokens", default="1,2,3", show_default=True, help="Values of K.")
@click.option("--drafter", type=click.Choice(DRAFTERS), help="What drafts.  [default: draft model or head, if any]")
@click.option("--draft-model", type=click.Path(path_type=Path), help="Bundle of a second model that drafts.")
@engine_options
def acceptance(
    bundle: Path | None,
    prompts: Path,
    burst: int,
    run: int,
    draft_tokens: str,
    drafter: str | None,
    draft_model: Path | None,
    engine: EngineOptions,
) -> None:
    """Measure acceptance: short answers and long ones apart, since a tiny model repeats itself in long ones."""
    try:
        widths = [int(part) for part in draft_tokens.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--draft-tokens takes whole numbers with commas, found {draft_tokens!r}.") from error
    if min(widths) < 1:
        raise click.UsageError(f"--draft-tokens is {draft_tokens}; acceptance is measured for values of at least 1.")
    requests = requests_from_file(prompts, {"ignore_eos": True, "drafter": drafter})
    model = open_model(bundle, engine, requests, draft_model)
    header = _HEADER
    for length in (burst, run):
        for width in widths:
            row = _row(length, width, measure(model, requests, length, width))
            print(f"{header}\n{row}" if header else row, flush=True)
            header = ""


def measure(model: Model, requests: Sequence[Request], new_tokens: int, draft_tokens: int) -> Stats:
    """Statistics over all prompts."""
    return merge(
        [model.complete(request, max_new_tokens=new_tokens, draft_tokens=draft_tokens).stats for request in requests]
    )


def _row(length: int, width: int, stats: Stats) -> str:
    values = stats.as_dict()
    positions = " / ".join(f"{rate:.2f}" for rate in values["acceptance_by_position"])
    return (
        f"| up to {length} tokens | {width} | {stats.drafted} | {stats.accepted} | {values['acceptance_rate']:.3f} | "
        f"{positions} | {values['emitted_per_cycle']:.2f} |"
    )
