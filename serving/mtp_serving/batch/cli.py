"""The command `mtp-run batch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from mtp_engines.backends.options import EngineOptions
from mtp_engines.errors import RequestError
from mtp_runtime.batching.scheduler import BatchOptions, Scheduler
from mtp_runtime.cli import DraftTokensParameter, bundle_argument, engine_options, open_model
from mtp_runtime.request import DEFAULT_NEW_TOKENS, DraftTokens, request_from
from mtp_serving.batch.answers import answers
from mtp_serving.batch.files import Output, numbered_lines, require_same


@click.command()
@bundle_argument
@click.option(
    "--input", "source", type=click.Path(path_type=Path), required=True, help="File with one JSON object a line."
)
@click.option("--output", type=click.Path(path_type=Path), required=True, help="File of answers; continued if there.")
@click.option("--slots", type=click.IntRange(min=1), help="Answers at once.  [default: as built]")
@click.option("--cache-rows", type=click.IntRange(min=1), help="Of all answers together.  [default: every context]")
@click.option("--max-new-tokens", default=DEFAULT_NEW_TOKENS, show_default=True, help="Where a line does not say.")
@click.option("--draft-tokens", type=DraftTokensParameter(), help="Where a line does not say.  [default: 3]")
@click.option("--chat", is_flag=True, help="Render prompts with the chat template.")
@click.option("--retry-errors", is_flag=True, help="Ask lines again whose answer is an error.")
@engine_options
def batch(
    bundle: Path | None,
    source: Path,
    output: Path,
    slots: int | None,
    cache_rows: int | None,
    max_new_tokens: int,
    draft_tokens: DraftTokens | None,
    chat: bool,
    retry_errors: bool,
    engine: EngineOptions,
) -> int:
    """Answer a file of prompts, several at once. Started again after whatever stopped it, it goes on."""
    defaults: dict[str, Any] = {"max_new_tokens": max_new_tokens, "draft_tokens": draft_tokens, "chat": chat}
    if source.exists() and output.exists() and source.samefile(output):
        raise RequestError(f"--input and --output are both {output}; give another --output.")
    with closing(Output(output, retry_errors=retry_errors)) as out:
        lines = dict(_new(source, out.done))
        before = len(out.done)
        if not lines and not before:
            raise RequestError(f"{source} has no prompts; write one JSON object a line.")
        if not lines:
            print(f"{output}: all {before} lines were answered before{_again(out.errors)}", file=sys.stderr)
            return 1 if out.errors else 0
        # What the options of the command ask for is the same for all lines, so that is refused before the first.
        model = open_model(
            bundle, engine, [request_from({**defaults, "prompt_ids": [0], "chat": False}, "the command line")]
        )
        scheduler = Scheduler(model, BatchOptions(slots, cache_rows=cache_rows))
        scheduler.start()
        started, tokens = time.perf_counter(), 0
        try:
            for number, record in answers(scheduler, lines.items(), defaults):
                out.add(number, lines[number], record)
                tokens += sum(len(one.get("token_ids", ())) for one in record.get("answers", [record]))
        finally:
            scheduler.close(drain=False)
    seconds = time.perf_counter() - started
    print(
        f"{output}: {len(lines)} lines answered, {before} were there; {tokens} tokens, {tokens / seconds:.1f} tok/s"
        f"{_again(out.errors)}",
        file=sys.stderr,
    )
    return 1 if out.errors else 0


def _again(errors: dict[int, str]) -> str:
    """How many lines could not be answered, why the first could not, and what to do."""
    if not errors:
        return ""
    first = min(errors)
    return f"; {len(errors)} have an error, line {first}: {errors[first]} --retry-errors asks them again"


def _new(source: Path, done: dict[int, str]) -> Iterator[tuple[int, str]]:
    for number, line in numbered_lines(source):
        if not require_same(done, number, line, source):
            yield number, line
