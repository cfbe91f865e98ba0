"""The command `mtp-run bench`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import open_bundle
from mtp_engines.engine import CycleSequences
from mtp_engines.errors import RequestError
from mtp_runtime.api import Model
from mtp_runtime.cli import bundle_argument, engine_options, find_bundle, open_model
from mtp_runtime.prompts import Prompts
from mtp_runtime.request import AUTO
from mtp_tools.bench import machine
from mtp_tools.bench.answers import head_of
from mtp_tools.bench.cases import acceptances_from, branches_from, cases_of, require_served, widths_from
from mtp_tools.bench.measuring import Measured, Plan, measure
from mtp_tools.bench.plot import draw, require_drawable
from mtp_tools.bench.prompts import Given, prompts_of
from mtp_tools.bench.report import (
    Memory,
    bundle_dict,
    case_dict,
    counts_table,
    memory_line,
    roofline,
    roofline_line,
    speed_table,
    tokens_sha256,
)
from mtp_tools.bench.sizes import engine_threads, kernels_of, sizes_of, step_bytes
from mtp_tools.bench.summary import Row, summarise

_CACHED = 64 << 20
"""A step that reads less may find it in the caches of a CPU."""


@dataclass(frozen=True)
class Asked:
    """The command line."""

    directory: Path
    draft_tokens: str
    force_accept: str | None
    prompts: Path | None
    prompt_tokens: int | None
    new_tokens: int
    repeats: int
    seed: int
    engine: EngineOptions
    draft_branches: str = "0"
    cpu_time: bool = False

    @property
    def command(self) -> str:
        """The command that repeats it; every option with a value stands there."""
        given = {
            "--draft-tokens": self.draft_tokens,
            "--draft-branches": self.draft_branches,
            "--force-accept": self.force_accept,
            "--prompts": self.prompts,
            "--prompt-tokens": self.prompt_tokens,
            "--new-tokens": self.new_tokens,
            "--repeats": self.repeats,
            "--seed": self.seed,
            "--threads": self.engine.threads,
            "--backend": self.engine.backend,
            "--device": self.engine.device,
        }
        options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
        flags = ["--cpu-time"] if self.cpu_time else []
        return shlex.join(["mtp-run", "bench", str(self.directory), *options, *flags])


@click.command()
@bundle_argument
@click.option(
    "--draft-tokens", default="0,1,2,3", show_default=True, help="Values of K, and auto; 0 is always measured."
)
@click.option(
    "--draft-branches", default="0", show_default=True, help="Further drafts from the first places on: 0, 1, 2."
)
@click.option("--force-accept", help="Shares of right drafts, such as 1.0,0.7,0.  [default: the head's own drafts]")
@click.option("--prompts", type=click.Path(path_type=Path), help="File with one JSON object a line.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), help="Tokens of a made-up prompt.  [default: 128]")
@click.option("--new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of an answer.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Rounds that count.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of forced drafts, made-up ids.")
@click.option("--cpu-time", is_flag=True, help="Time on a CPU, not on the wall; needs --threads 1.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File for one JSON line with everything.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Picture of tokens/s over K, .png or .svg.")
@engine_options
def bench(bundle: Path | None, json_file: Path | None, plot_file: Path | None, **asked: Any) -> None:
    """Measure plain decoding and every K in turn, on tokens that must agree."""
    if asked["prompts"] is not None and asked["prompt_tokens"] is not None:
        raise click.UsageError("give --prompts or --prompt-tokens, not both: prompts of a file are taken as they are.")
    if asked["cpu_time"] and asked["engine"].threads != 1:
        raise click.UsageError("--cpu-time adds up the time of all threads; give --threads 1 with it.")
    if plot_file is not None:
        require_drawable(plot_file)
    for option, file in (("--json", json_file), ("--plot", plot_file)):
        _require_place(option, file)
    result, rows = run_bench(Asked(find_bundle(bundle), **asked))
    if json_file is not None:
        json_file.write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")
    if plot_file is not None:
        draw(rows, f"{result['bundle']['name']}, {result['new_tokens']} new tokens", plot_file)


def run_bench(asked: Asked) -> tuple[dict[str, Any], list[Row]]:
    """Measure, print the tables, and return what the JSON line holds.

    Raises:
        UsageError: a list cannot be read.
        RequestError: the bundle cannot do what is asked.
        WrongTokensError: a draft changed an answer.
    """
    widths, rates = widths_from(asked.draft_tokens), acceptances_from(asked.force_accept)
    if rates and not any(widths):
        raise click.UsageError("--force-accept forces drafts, but --draft-tokens asks for none; add a K above 0.")
    branches = branches_from(asked.draft_branches, rates)
    load = os.getloadavg()[0]
    opened = open_bundle(asked.directory)
    given = prompts_of(Prompts(opened.directory), opened.manifest, asked.prompts, asked.prompt_tokens, asked.seed)
    plan = Plan(given.ids, cases_of(widths, rates, branches), asked.new_tokens, asked.repeats, asked.seed)
    plan = replace(plan, cpu_time=asked.cpu_time)
    require_served(plan.cases, given.longest, plan.new_tokens, opened.manifest)
    before = machine.resident_bytes()
    model = open_model(asked.directory, asked.engine)
    loaded = machine.resident_bytes()
    physical = machine.physical_cores(machine.read_cpuinfo())
    threads = engine_threads(model.engine, physical)
    bandwidth = machine.ReadBandwidth(threads or physical)
    measured = measure(model, plan, bandwidth, lambda line: print(line, file=sys.stderr, flush=True))
    rows = summarise(measured.rounds)
    most = max(case.most_draft_tokens(opened.manifest) for case in plan.cases)
    sizes = sizes_of(opened, given.longest + plan.new_tokens, most, 1 + max(case.draft_branches for case in plan.cases))
    memory = Memory(before, loaded, measured.peak_bytes, sizes).as_dict()
    found = None if threads is None else _roofline(model, measured, plan, bandwidth)
    result = _settings(asked, given, model, threads, load) | {
        "tokens_sha256": tokens_sha256(measured, plan),
        "memory": memory,
        "roofline": found,
        "cycle_costs_s": cycle_costs(model, plan),
        "cases": [case_dict(row) for row in rows],
    }
    for line in (*speed_table(rows), "", *counts_table(rows), ""):
        print(line)
    count = "threads as the backend chooses" if threads is None else f"threads: {threads}"
    clock = "; time on a CPU" if plan.cpu_time else ""
    kernels = "" if result["kernels"] is None else f"; kernels: {result['kernels']}"
    print(f"prompt: {given.source}; new tokens: {plan.new_tokens}; rounds: {plan.repeats}; {count}{kernels}{clock}")
    print(memory_line(memory))
    print(roofline_line(found, found is not None and found["step_bytes"] < _CACHED))
    print(f"repeat: {asked.command}", flush=True)
    return result, rows


def _settings(asked: Asked, given: Given, model: Model, threads: int | None, load: float) -> dict[str, Any]:
    cpuinfo = machine.read_cpuinfo()
    return {
        "command": asked.command,
        "bundle": bundle_dict(model.bundle),
        "backend": asked.engine.backend or model.manifest.backend,
        "device": asked.engine.device or model.manifest.device,
        "prompt_source": given.source,
        "prompt_tokens": [len(prompt) for prompt in given.ids],
        "new_tokens": asked.new_tokens,
        "repeats": asked.repeats,
        "seed": asked.seed,
        "threads": threads,
        "kernels": kernels_of(model.engine),
        "cpu_time": asked.cpu_time,
        "versions": machine.versions(),
        "machine": {
            "architecture": os.uname().machine,
            "cores": machine.available_cores(),
            "physical_cores": machine.physical_cores(cpuinfo),
            "instruction_sets": machine.instruction_sets(cpuinfo),
            "load_before": load,
        },
    }


def cycle_costs(model: Model, plan: Plan) -> dict[str, Any] | None:
    """What the policy knows of this machine; None if K was fixed in all cases."""
    found = [case for case in plan.cases if case.draft_tokens == AUTO]
    if not found:
        return None
    whole = isinstance(model.engine.sequences(), CycleSequences) and not plan.host_loop
    return asdict(model.auto.costs(head_of(model), whole=whole))


def _roofline(model: Model, measured: Measured, plan: Plan, bandwidth: machine.ReadBandwidth) -> dict[str, Any]:
    """Behind the middle of the answers."""
    rows = sum(len(prompt) for prompt in plan.prompts) // len(plan.prompts) + plan.new_tokens // 2
    return roofline(measured, step_bytes(model.bundle, rows), bandwidth.how, bandwidth.threads)


def _require_place(option: str, file: Path | None) -> None:
    """Refuse before anything is measured.

    Raises:
        RequestError: nothing can be written there.
    """
    if file is None:
        return
    if file.is_dir() or not file.parent.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise RequestError(f"{option} is {file}, which cannot be written; give a file in a directory that exists.")
