"""Drawn drafts or best ones under sampling: `python -m mtp_tools.draft_rule BUNDLE --prompts FILE`.

With temperature above 0 a draft token can be drawn from the head's law, or be its best token. This counts what each of
the exact acceptors keeps of either, at several temperatures, over the same prompts and seeds. The runtime draws.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from mtp_engines.command import run_command
from mtp_engines.errors import RequestError
from mtp_runtime.api import Model, load
from mtp_runtime.cli import requests_from_file
from mtp_runtime.drafters.registry import own_head
from mtp_runtime.ending import Ending
from mtp_runtime.events import Finished
from mtp_runtime.policy import FixedPolicy
from mtp_runtime.request import Request, request_from
from mtp_runtime.sampling.acceptors import COUPLED, REJECTION
from mtp_runtime.sampling.sampler import Sampler
from mtp_runtime.stats import Stats, merge
from mtp_runtime.text import TextStream


def kept(model: Model, requests: Sequence[Request], draft_tokens: int, *, drawn: bool) -> Stats:
    """Counts over all requests, each with the seed of its place."""
    counted = []
    for seed, request in enumerate(requests):
        prepared = model.prompts.prepare(request_from({**vars(request), "seed": seed}, "a request"), model.manifest)
        sampler = Sampler(prepared.prompt, model.manifest.model.vocab_size, prepared.decoding, ())
        sequences = model.engine.sequences()
        drafter = own_head(model.engine, sequences, sampler.drafting if drawn else None)
        ending = Ending(prepared.limit, (), TextStream(None, ()))
        events = model.run(prepared.prompt, sequences, drafter, FixedPolicy(draft_tokens), ending, acceptor=sampler)
        counted += [event.stats for event in events if isinstance(event, Finished)]
    return merge(counted)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompts", type=click.Path(path_type=Path), required=True, help="File with one JSON object a line.")
@click.option("--temperatures", default="0.3,0.7,1.0,1.5", show_default=True, help="Values, with commas.")
@click.option("--draft-tokens", default=3, show_default=True, help="K.")
@click.option("--new-tokens", default=48, show_default=True, help="Tokens of an answer.")
@click.option("--limit", default=24, show_default=True, help="Prompts to take from the file.")
def draft_rule(bundle: Path, prompts: Path, temperatures: str, draft_tokens: int, new_tokens: int, limit: int) -> None:
    """Compare drawn drafts with best ones."""
    try:
        values = [float(part) for part in temperatures.split(",")]
    except ValueError as error:
        raise RequestError(f"--temperatures is {temperatures!r}, expected numbers with commas.") from error
    model = load(bundle, threads=1)
    if model.engine.spec.mtp is None or model.engine.spec.mtp.has_table:
        raise RequestError(f"{bundle} has no head that draws drafts; build it with one, and without a table of ids.")
    print("| temperature | acceptor | kept, drawn | emitted a cycle | kept, best | emitted a cycle |")
    print("|---|---|---|---|---|---|")
    for temperature in values:
        for acceptor in (COUPLED, REJECTION):
            asked = {"temperature": temperature, "acceptor": acceptor, "max_new_tokens": new_tokens, "ignore_eos": True}
            requests = requests_from_file(prompts, asked)[:limit]
            cells = []
            for drawn in (True, False):
                values_of = kept(model, requests, draft_tokens, drawn=drawn).as_dict()
                cells.append(f"{values_of['acceptance_rate']:.3f} | {values_of['emitted_per_cycle']:.2f}")
            print(f"| {temperature} | {acceptor} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(draft_rule))
