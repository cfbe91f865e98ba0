"""The command `mtp-run acceptance`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mtp_runtime.api import Model, load
from mtp_runtime.cli import find_bundle, requests_from_file
from mtp_runtime.request import Request
from mtp_runtime.stats import Stats, merge


def acceptance(
    prompts: Annotated[Path, typer.Option("--prompts", help="File with one JSON object a line.")],
    bundle: Annotated[
        Path | None, typer.Argument(help="Bundle directory.  [default: the only one in bundles/]")
    ] = None,
    burst: Annotated[int, typer.Option("--burst", help="Tokens of a short answer.", min=2)] = 12,
    run: Annotated[int, typer.Option("--run", help="Tokens of a long answer.", min=2)] = 96,
    draft_tokens: Annotated[str, typer.Option("--draft-tokens", help="Values of K, such as 1,2,3.")] = "1,2,3",
    threads: Annotated[int, typer.Option("--threads", help="Threads; 0 takes one a physical core.")] = 0,
) -> None:
    """Measure acceptance: short answers and long ones apart, since a tiny model repeats itself in long ones."""
    try:
        widths = [int(part) for part in draft_tokens.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--draft-tokens takes whole numbers with commas, found {draft_tokens!r}.") from error
    requests = requests_from_file(prompts, {"ignore_eos": True})
    model = load(find_bundle(bundle), threads)
    print("| answer | K | drafted | accepted | acceptance | by position | emitted a cycle |")
    print("|---|---|---|---|---|---|---|")
    for length in (burst, run):
        for width in widths:
            print(_row(length, width, measure(model, requests, length, width)), flush=True)


def measure(model: Model, requests: Sequence[Request], new_tokens: int, draft_tokens: int) -> Stats:
    """Statistics over all prompts."""
    return merge(
        [model.complete(request, max_new_tokens=new_tokens, draft_tokens=draft_tokens).stats for request in requests]
    )


def _row(length: int, width: int, stats: Stats) -> str:
    values = stats.as_dict()
    positions = " / ".join(f"{rate:.2f}" for rate in values["acceptance_by_position"])
    return (
        f"| {length} tokens | {width} | {stats.drafted} | {stats.accepted} | {values['acceptance_rate']:.3f} | "
        f"{positions} "
        f"| {values['emitted_per_cycle']:.2f} |"
    )
