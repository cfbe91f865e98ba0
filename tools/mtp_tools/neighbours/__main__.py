"""`python -m mtp_tools.neighbours --checkpoint DIR --work DIR`: other engines beside ours, in turns."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from mtp_engines.command import run_command
from mtp_tools.bench import machine
from mtp_tools.bench.cases import widths_from
from mtp_tools.made_up.successors import Successors
from mtp_tools.neighbours.checkpoints import claim, read_config, text_config
from mtp_tools.neighbours.contenders import contenders_from
from mtp_tools.neighbours.conversions import Job
from mtp_tools.neighbours.results import compare, comparison_dict, row_dict, rows_of
from mtp_tools.neighbours.rounds import Entry, Measured, Plan, measure
from mtp_tools.neighbours.starting import Absent, bring_up
from mtp_tools.neighbours.table import about_lines, absent_lines, ratio_table, speed_table

_SPARE = 64
"""Rows of context beyond prompt and answer: drafts, and what an engine rounds up."""
say = partial(print, file=sys.stderr, flush=True)


@click.command("python -m mtp_tools.neighbours")
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), required=True, help="What all of them run.")
@click.option("--work", type=click.Path(path_type=Path), required=True, help="For environments, models and logs.")
@click.option("--only", help="Engines with commas, ours among them.  [default: all]")
@click.option("--weights", help="Of fp32, int8, int4, with commas.  [default: all]")
@click.option("--draft-tokens", default="1,2,3,auto", show_default=True, help="Values of K beside 0; auto is ours.")
@click.option(
    "--force-accept", type=click.FloatRange(0, 1), help="Share of our drafts made right.  [default: as drafted]"
)
@click.option("--draft-vocab", type=click.IntRange(min=1), help="Ids that our head drafts from.  [default: all]")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Made-up ids.")
@click.option("--new-tokens", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens of an answer.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="That count.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Of every engine.")
@click.option("--max-model-len", type=click.IntRange(min=1), default=768, show_default=True, help="Of every engine.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the prompt, forced drafts.")
@click.option(
    "--made-up-seed", type=click.IntRange(min=0), help="Seed of mtp_tools.made_up, if that made the checkpoint."
)
@click.option("--prepare-only", is_flag=True, help="Install and convert, measure nothing.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File for one JSON line with everything.")
def main(checkpoint: Path, work: Path, only: str | None, weights: str | None, **asked: Any) -> None:
    """Run other engines on the same checkpoint beside ours, in turns, and compare speed and tokens."""
    contenders = contenders_from(only, weights)
    widths = tuple(width for width in widths_from(asked["draft_tokens"]) if width)
    if asked["prompt_tokens"] + asked["new_tokens"] + _SPARE > asked["max_model_len"]:
        raise click.UsageError("--max-model-len must hold the prompt, the new tokens and 64 more.")
    work.mkdir(parents=True, exist_ok=True)
    claim(work, checkpoint)
    job = Job(
        checkpoint.resolve(),
        work.resolve(),
        asked["threads"],
        asked["max_model_len"],
        widths,
        asked["force_accept"],
        asked["draft_vocab"],
        asked["seed"],
    )
    plan = plan_of(job, asked)
    entries, absent = bring_up(contenders, job, say, load=not asked["prepare_only"])
    if asked["prepare_only"]:
        print("\n".join(["cannot be prepared:", *absent_lines(absent, ())]) if absent else "all of them are prepared")
        return
    try:
        result = _measured(entries, absent, plan)
    finally:
        for entry in entries:
            entry.worker.close()
    if asked["json_file"] is not None:
        asked["json_file"].write_text(json.dumps(result, ensure_ascii=False) + "\n", encoding="utf-8")


def plan_of(job: Job, asked: dict[str, Any]) -> Plan:
    """Prompt and, for a made-up checkpoint, the answer that its weights mean."""
    vocab = int(text_config(read_config(job.checkpoint))["vocab_size"])
    prompt = tuple(np.random.default_rng(job.seed).integers(0, vocab, asked["prompt_tokens"]).tolist())
    expected = None
    if asked["made_up_seed"] is not None:
        successors, token, found = Successors(vocab, 1.0, asked["made_up_seed"]), np.array(prompt[-1:]), []
        for _ in range(asked["new_tokens"]):
            token = successors.target(token)
            found.append(int(token[0]))
        expected = tuple(found)
    return Plan(prompt, asked["new_tokens"], job.draft_tokens, asked["rounds"], expected)


def _measured(entries: Sequence[Entry], absent: Sequence[Absent], plan: Plan) -> dict[str, Any]:
    load_before = os.getloadavg()[0]
    measured = measure(entries, plan, say)
    _print(measured, absent, plan)
    print(f"load of the machine: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after; cores: {os.cpu_count()}")
    print(f"repeat: {shlex.join(['python', '-m', 'mtp_tools.neighbours', *sys.argv[1:]])}")
    rows = rows_of(measured.cases)
    return {
        "command": shlex.join(sys.argv[1:]),
        "prompt": list(plan.prompt),
        "expected": plan.expected,
        "compared_with": measured.expected_from,
        "instruction_sets": machine.instruction_sets(machine.read_cpuinfo()),
        "load_before": load_before,
        "about": {entry.contender.name: entry.ready.about for entry in entries},
        "did_not_run": list(absent_lines(absent, measured.cases)),
        "cases": [row_dict(row) for row in rows],
        "comparisons": [comparison_dict(found) for found in compare(rows)],
    }


def _print(measured: Measured, absent: Sequence[Absent], plan: Plan) -> None:
    rows = rows_of(measured.cases)
    for line in (*speed_table(rows), "", *ratio_table(list(compare(rows))), ""):
        print(line)
    missing = list(absent_lines(absent, measured.cases))
    print("\n".join(["did not run:", *missing, ""]) if missing else "all of them ran\n")
    print("\n".join(about_lines(measured.cases)))
    print(f"\nids are compared with {measured.expected_from}")
    print(f"prompt: {len(plan.prompt)} made-up ids; new tokens: {plan.new_tokens}; rounds: {plan.rounds}, in turns")


if __name__ == "__main__":
    sys.exit(run_command(main))
