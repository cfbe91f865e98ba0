"""The command line `mtp-run`. Further commands come from the entry points `mtp_run.commands`."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from mtp_engines.backends.options import BACKENDS, DeviceKind, EngineOptions
from mtp_engines.bundle import WEIGHTS, bundles_in
from mtp_engines.command import run_command
from mtp_engines.errors import RequestError
from mtp_runtime.api import Model, load
from mtp_runtime.constraints.flags import constraint_options
from mtp_runtime.drafters.registry import DRAFTERS
from mtp_runtime.events import Emitted, Finished
from mtp_runtime.records import footer_of, record_of
from mtp_runtime.request import AUTO, DEFAULT_NEW_TOKENS, DraftTokens, Request, object_from_json, request_from
from mtp_runtime.sampling.flags import sampling_options

_SLOW_BYTES = 256 << 20
"""Weights above this take more than a second to load."""

bundle_argument = click.argument("bundle", type=click.Path(path_type=Path), required=False)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --threads, --backend and --device to a command, which takes them as one `engine`."""

    @functools.wraps(command)
    def with_engine(*args: Any, threads: int, backend: str | None, device: DeviceKind | None, **others: Any) -> Any:
        return command(*args, engine=EngineOptions(threads, backend, device), **others)

    for option in (
        click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where it runs.  [default: as built]"),
        click.option("--backend", type=click.Choice(BACKENDS), help="What runs it.  [default: as built]"),
        click.option(
            "--threads", type=click.IntRange(0, 4 * (os.cpu_count() or 1)), default=0, help="Threads; 0 chooses."
        ),
    ):
        with_engine = option(with_engine)
    return with_engine


class DraftTokensParameter(click.ParamType[DraftTokens]):
    """A whole number, or `auto`."""

    name = "integer|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DraftTokens:
        """From the text of the command line."""
        try:
            return AUTO if value == AUTO else int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor 'auto'.", param, ctx)


@click.group("mtp-run", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mtp-export")
def group() -> None:
    """Generate from a bundle with exact speculative decoding. Without BUNDLE, the only one in bundles/ is taken."""


@group.command()
@bundle_argument
@click.option("--prompt", help="Text to continue.")
@click.option("--prompt-ids", help="Token ids, such as 1,2,3.")
@click.option("--prompts", type=click.Path(path_type=Path), help="File with one JSON object a line.")
@click.option("--chat", is_flag=True, help="Render the prompt with the chat template.")
@click.option("--max-new-tokens", default=DEFAULT_NEW_TOKENS, show_default=True, help="Most tokens to generate.")
@click.option("--draft-tokens", type=DraftTokensParameter(), help="Draft tokens a cycle, or auto.  [default: 3]")
@click.option("--drafter", type=click.Choice(DRAFTERS), help="What drafts.  [default: draft model or head, if any]")
@click.option("--draft-model", type=click.Path(path_type=Path), help="Bundle of a smaller model that drafts.")
@click.option("--ngram-min", type=int, help="Shortest match of a lookup.  [default: 2]")
@click.option("--ngram-max", type=int, help="Longest match of a lookup.  [default: 4]")
@click.option("--ignore-eos", is_flag=True, help="Do not end at end tokens.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may repeat.")
@sampling_options
@constraint_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object an answer.")
@engine_options
def generate(
    bundle: Path | None,
    prompt: str | None,
    prompt_ids: str | None,
    prompts: Path | None,
    chat: bool,
    max_new_tokens: int,
    draft_tokens: DraftTokens | None,
    drafter: str | None,
    draft_model: Path | None,
    ngram_min: int | None,
    ngram_max: int | None,
    ignore_eos: bool,
    stop: tuple[str, ...],
    sampling: dict[str, Any],
    as_json: bool,
    engine: EngineOptions,
) -> None:
    """Generate from a prompt, streaming the text, or from a file of prompts."""
    defaults: dict[str, Any] = {
        "chat": chat,
        "max_new_tokens": max_new_tokens,
        "draft_tokens": draft_tokens,
        "drafter": drafter,
        "ngram_min": ngram_min,
        "ngram_max": ngram_max,
        "ignore_eos": ignore_eos,
        "stop": list(stop) or None,
    }
    requests = list(_requests(prompt, prompt_ids, prompts, defaults | sampling))
    if not as_json:
        _require_no_scores(requests)
    model = open_model(bundle, engine, requests, draft_model)
    for number, request in enumerate(requests, 1):
        if as_json:
            for event in model.generate(request):
                if isinstance(event, Finished):
                    print(json.dumps(record_of(request, event), ensure_ascii=False), flush=True)
            continue
        if len(requests) > 1:
            print(f"--- {number if request.id is None else request.id}")
        _stream(model, request)


def open_model(
    given: Path | None, engine: EngineOptions, requests: Iterable[Request] = (), draft_model: Path | None = None
) -> Model:
    """Load the bundle that was named, or the only one; says on stderr if that takes a while, and what to know of it.

    Raises:
        RequestError: no bundle can be chosen, or it cannot serve one of the requests.
        BundleError: it, or that of the draft model, cannot be opened, or the two do not go together.
    """
    directory = find_bundle(given)
    weights = [place / WEIGHTS for place in (directory, draft_model) if place is not None]
    size = sum(file.stat().st_size for file in weights if file.is_file())
    if size > _SLOW_BYTES:
        print(f"loading {size / 1e9:.1f} GB of weights", file=sys.stderr, flush=True)
    model = load(directory, requests=requests, draft_model=draft_model, options=engine)
    for note in model.notes:
        print(note, file=sys.stderr, flush=True)
    return model


def find_bundle(given: Path | None) -> Path:
    """The bundle that was named, or the only one under bundles/.

    Raises:
        RequestError: none or several bundles, and none was named.
    """
    if given is not None:
        return given
    found = bundles_in(Path("bundles"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise RequestError(
            "no bundle was named and bundles/ holds none; build one with `mtp-export build --model MODEL`."
        )
    raise RequestError(f"no bundle was named and bundles/ holds {len(found)}: {', '.join(map(str, found))}. Name one.")


def main() -> None:
    """Entry point of `mtp-run`."""
    for entry in entry_points(group="mtp_run.commands"):
        group.add_command(entry.load(), entry.name)
    sys.exit(run_command(group))


def _requests(
    prompt: str | None, prompt_ids: str | None, prompts: Path | None, defaults: dict[str, Any]
) -> Iterator[Request]:
    given = [
        name
        for name, value in (("--prompt", prompt), ("--prompt-ids", prompt_ids), ("--prompts", prompts))
        if value is not None
    ]
    if len(given) != 1:
        raise click.UsageError(
            f"give exactly one of --prompt, --prompt-ids and --prompts, found {', '.join(given) or 'none'}."
        )
    if prompt is not None:
        yield request_from(defaults | {"prompt": prompt}, "the command line")
    elif prompt_ids is not None:
        yield request_from(defaults | {"prompt_ids": _parse_ids(prompt_ids)}, "the command line")
    elif prompts is not None:
        yield from requests_from_file(prompts, defaults)


def requests_from_file(path: Path, defaults: dict[str, Any]) -> list[Request]:
    """Requests of a file with one JSON object a line, whose fields override the defaults.

    Raises:
        RequestError: the file cannot be read, is empty, or a line is no request; names the line.
    """
    return [request_from(defaults | given, where) for where, given in objects_from_file(path)]


def objects_from_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file with one JSON object a line, each with the name of its line for errors.

    Raises:
        RequestError: the file cannot be read, is empty, or a line is no JSON object; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}. Give a file of JSON lines.") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text. Give a file of JSON lines.") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise RequestError(f"{path} has no prompts; write one JSON object a line.")
    for number, line in numbered:
        where = f"{path} line {number}"
        yield where, object_from_json(line, where)


def _parse_ids(text: str) -> list[int]:
    if not text.strip():
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        shown = text if len(text) <= 80 else text[:80] + "…"
        raise click.UsageError(f"--prompt-ids takes whole numbers with commas, found {shown!r}.") from error


def _require_no_scores(requests: Iterable[Request]) -> None:
    for request in requests:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(request, name) is not None:
                raise click.UsageError(f"{name} is {getattr(request, name)}, and text has no place for it; add --json.")


def _stream(model: Model, request: Request) -> None:
    has_text = model.prompts.tokenizer is not None
    shown_index = 0 if request.n == 1 else -1
    for event in model.generate(request):
        if isinstance(event, Emitted):
            if event.index != shown_index:
                shown_index = event.index
                print(f"--- answer {shown_index + 1} of {request.n}")
            shown = event.text if has_text else "".join(f"{token} " for token in event.token_ids)
            print(shown, end="", flush=True)
        elif isinstance(event, Finished):
            print(flush=True)
            print(footer_of(event), file=sys.stderr)
