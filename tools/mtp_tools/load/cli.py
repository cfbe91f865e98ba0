"""The command line: a measurement, or with `--soak` a test of what the server does when things go wrong."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from mtp_engines.bundle import open_bundle
from mtp_engines.errors import RequestError
from mtp_runtime.prompts import Prompts
from mtp_tools.load.traffic import Lengths, material_of

_MOST_CONCURRENT, _MOST_REQUESTS, _MOST_SOAK_S = 256, 10_000, 7200


@click.command("python -m mtp_tools.load")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--url", help="A server that runs already, on this machine.  [default: one is started]")
@click.option("--allow-remote", is_flag=True, help="Let --url be another machine.")
@click.option("--model", help="What the server of --url calls the model.  [default: it is asked]")
@click.option("--concurrency", default="1,8,32", show_default=True, help="Most requests at once, with commas.")
@click.option("--requests", type=click.IntRange(1, _MOST_REQUESTS), default=32, show_default=True, help="Of a block.")
@click.option("--blocks", type=click.IntRange(1, 100), default=5, show_default=True, help="Rounds of all policies.")
@click.option("--prompt-tokens", default="8:96", show_default=True, help="Of a prompt, from least to most.")
@click.option("--new-tokens", default="16:64", show_default=True, help="Of an answer, from least to most.")
@click.option("--draft-tokens", type=click.IntRange(min=1), default=3, show_default=True, help="K where it is fixed.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Arrivals a second.  [default: too many]")
@click.option("--prompts", type=click.Path(path_type=Path), help="JSON lines that prompts are cut from.")
@click.option("--slots", type=click.IntRange(min=1), help="Of the server that is started.  [default: as built]")
@click.option("--threads", type=click.IntRange(min=0), default=0, help="Of the server that is started.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--soak", type=click.FloatRange(1, _MOST_SOAK_S), help="Seconds of a test with faults instead.")
@click.option("--kills", type=click.IntRange(0, 100), default=2, show_default=True, help="Of the server in a soak.")
@click.option("--fault", help="A fault that the soak must find: a control of the test itself.")
@click.option("--log", type=click.Path(path_type=Path), help="File for the server's messages.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="File for the result, one line.")
def main(bundle: Path, prompts: Path | None, seed: int, soak: float | None, path: Path | None, **given: Any) -> int:
    """Load a server of BUNDLE: Poisson arrivals, mixed lengths, speculation fixed, auto and off in turns."""
    if find_spec("httpx") is None:
        raise RequestError("a load needs httpx, which is not installed here; install it with `pip install httpx`.")
    prompt, answer = (
        Lengths.parsed(given[name], f"--{name.replace('_', '-')}") for name in ("prompt_tokens", "new_tokens")
    )
    opened = open_bundle(bundle)
    limit = opened.manifest.limits.max_model_len
    if prompt.most + answer.most > limit:
        raise RequestError(
            f"prompts of {prompt.most} and answers of {answer.most} tokens do not fit into the {limit} of {bundle}; "
            "give smaller --prompt-tokens or --new-tokens."
        )
    material = material_of(Prompts(bundle), opened.manifest, prompts, seed)
    with tempfile.TemporaryDirectory() as directory:
        log = given["log"] or Path(directory) / "server.log"
        if soak is None:
            record, found = _measured(bundle, material, prompt, answer, seed, log, given)
        else:
            record, found = _soaked(bundle, material, prompt, answer, seed, soak, log, given)
    line = json.dumps(record)
    print(line)
    if path is not None:
        path.write_text(line + "\n", encoding="utf-8")
    for sentence in found[:20]:
        print(sentence, file=sys.stderr)
    return 1 if found else 0


def _measured(
    bundle: Path, material: list[int], prompt: Lengths, answer: Lengths, seed: int, log: Path, given: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    from mtp_tools.load.measuring import Plan, measure
    from mtp_tools.load.processes import ServerProcess, require_loopback, running
    from mtp_tools.load.report import faults, table

    plan = Plan(
        _numbers(given["concurrency"]),
        given["requests"],
        given["blocks"],
        prompt,
        answer,
        given["draft_tokens"],
        given["rate"],
        seed,
    )
    if given["fault"]:
        raise RequestError("--fault goes with --soak; leave it out.")
    url: str | None = given["url"]
    if url is not None:
        require_loopback(url, allow_remote=given["allow_remote"])
        levels = asyncio.run(measure(url, given["model"], material, plan, _note))
    else:
        # No policy may find what another one has read.
        # Started for auto, it measures what cycles of several answers cost, which auto goes by.
        arguments = ["--prefix-cache-bytes", "0", "--draft-tokens", "auto", *_server_options(given)]
        server = ServerProcess(bundle, arguments, log)
        with running(server) as address:
            levels = asyncio.run(measure(address, None, material, plan, _note, server.cpu_seconds))
    print("\n".join(table(levels)))
    record = {
        "bundle": bundle.name,
        "requests": plan.requests,
        "blocks": plan.blocks,
        "prompt_tokens": [prompt.least, prompt.most],
        "new_tokens": [answer.least, answer.most],
        "draft_tokens": plan.draft_tokens,
        "seed": seed,
        "levels": levels,
    }
    return record, faults(levels)


def _soaked(
    bundle: Path,
    material: list[int],
    prompt: Lengths,
    answer: Lengths,
    seed: int,
    seconds: float,
    log: Path,
    given: dict[str, Any],
) -> tuple[dict[str, Any], list[str]]:
    from mtp_tools.load.soak import SoakPlan, soak
    from mtp_tools.load.tampering import tamper_of

    if given["url"] is not None:
        raise RequestError("a soak kills its server, so it starts one of its own; leave --url out.")
    concurrency = max(_numbers(given["concurrency"]))
    plan = SoakPlan(seconds, given["kills"], concurrency, prompt, answer, seed, tamper_of(given["fault"]))
    outcome = asyncio.run(soak(bundle, material, plan, _server_options(given), log, _note))
    return outcome.as_dict(), outcome.failures


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and 0 < int(part) <= _MOST_CONCURRENT for part in parts):
        raise RequestError(f"--concurrency is {text!r}, expected numbers from 1 to {_MOST_CONCURRENT} with commas.")
    return [int(part) for part in parts]


def _server_options(given: dict[str, Any]) -> list[str]:
    options = ["--threads", str(given["threads"])]
    return options if given["slots"] is None else [*options, "--slots", str(given["slots"])]


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
