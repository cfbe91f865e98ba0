"""Timing prompt lookup against plain decoding, in turn within one process, so that a busy machine slows both alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import numpy as np

from mtp_runtime.api import Model
from mtp_runtime.request import Request
from mtp_runtime.stats import Stats, merge
from mtp_tools.smollm2.prompts import Prompt
from mtp_tools.smollm2.wheel import ModelError

_COMMITTED, _TIMINGS = 256, 5


@dataclass(frozen=True)
class Run:
    """One answer; `seconds` is wall time without prefill, everything else that a generation does included."""

    token_ids: tuple[int, ...]
    stats: Stats
    seconds: float


Round = dict[int, list[Run]]
"""K -> one run of each prompt of a kind; K = 0 is plain decoding."""


@dataclass(frozen=True)
class Measured:
    """Kind -> one round of each repeat; and rows -> median seconds of a verify of so many."""

    rounds: dict[str, list[Round]]
    costs: dict[int, float]


@dataclass(frozen=True)
class Row:
    """One kind of prompt at one K.

    Attributes:
        drafted: draft tokens proposed over all prompts; equal in every repeat.
        accepted: those kept.
        per_cycle: tokens that a cycle emitted, the target's own included.
        speeds: tokens a second after prefill, one of each repeat.
        ratios: time of plain decoding over time with drafts, one of each repeat.
        expected: the ratio that the cost of rows alone would give.
    """

    kind: str
    draft_tokens: int
    drafted: int
    accepted: int
    per_cycle: float
    speeds: tuple[float, ...]
    ratios: tuple[float, ...]
    expected: float


def measure(
    model: Model,
    prompts: Sequence[Prompt],
    widths: Sequence[int],
    repeats: int,
    new_tokens: int,
    report: Callable[[str], None] = lambda line: None,
) -> Measured:
    """Answer every prompt with every K in turn, `repeats` times over; `report` is told of each.

    Raises:
        ModelError: an answer differs from that of plain decoding.
    """
    every = (0, *widths)
    rounds: dict[str, list[Round]] = {prompt.kind: [] for prompt in prompts}
    times: dict[int, list[float]] = {rows: [] for rows in range(1, max(every) + 2)}
    _run(model, prompts[0], max(every), new_tokens)  # The first run pays for pages that later ones find in memory.
    for repeat in range(repeats):
        # Another order each time, so that no K always follows the same one.
        turn = every[repeat % len(every) :] + every[: repeat % len(every)]
        for kind, found in rounds.items():
            _time_rows(model, times)  # Among the answers, so that it sees the machine as they do.
            found.append({width: [] for width in every})
            for prompt in (prompt for prompt in prompts if prompt.kind == kind):
                runs = {width: _run(model, prompt, width, new_tokens) for width in turn}
                for width in every:
                    _require_equal(prompt, width, runs[0].token_ids, runs[width].token_ids)
                    found[-1][width].append(runs[width])
        report(f"repeat {repeat + 1} of {repeats} is done")
    return Measured(rounds, {rows: median(seconds) for rows, seconds in times.items()})


def _time_rows(model: Model, times: dict[int, list[float]]) -> None:
    """Add timings of a verify of each number of rows behind 256 committed ones, with a token chosen for each row."""
    sequences = model.engine.sequences()
    ids = np.arange(_COMMITTED, dtype=np.int64)[None] % model.manifest.model.vocab_size
    sequences.verify(ids, 0)
    sequences.commit(np.array([_COMMITTED]))
    for _ in range(_TIMINGS):
        for rows, found in times.items():
            start = time.perf_counter()
            sequences.verify(ids[:, :rows], rows)
            found.append(time.perf_counter() - start)


def summary(kind: str, rounds: Sequence[Round], costs: dict[int, float]) -> list[Row]:
    """One row for each K of a kind, plain decoding first."""
    rows = []
    plain = [_seconds(round_[0]) for round_ in rounds]
    for width, runs in rounds[0].items():
        stats = merge([run.stats for run in runs])
        emitted = sum(len(run.token_ids) - 1 for run in runs)  # Prefill emits the first token.
        seconds = [_seconds(round_[width]) for round_ in rounds]
        rows.append(
            Row(
                kind,
                width,
                stats.drafted,
                stats.accepted,
                emitted / max(stats.cycles, 1),
                tuple(emitted / spent for spent in seconds),
                tuple(before / spent for before, spent in zip(plain, seconds, strict=True)),
                emitted * costs[1] / expected_seconds(stats, costs),
            )
        )
    return rows


def expected_seconds(stats: Stats, costs: dict[int, float]) -> float:
    """Time of all cycles if each cost what a verify of its rows costs, and nothing else."""
    proposed = [stats.cycles, *stats.proposed_by_position, 0]
    counts = [more - less for more, less in pairwise(proposed)]
    return sum(count * costs[drafted + 1] for drafted, count in enumerate(counts) if count)


def sources(prompt: Sequence[int], answer: Sequence[int], length: int = 4) -> tuple[int, int, int]:
    """How many runs of `length` tokens of an answer stood in the prompt, else earlier in the answer, or nowhere."""
    known = {tuple(prompt[i : i + length]) for i in range(len(prompt) - length + 1)}
    seen: set[tuple[int, ...]] = set()
    counts = [0, 0, 0]
    for start in range(len(answer) - length + 1):
        run = tuple(answer[start : start + length])
        counts[0 if run in known else 1 if run in seen else 2] += 1
        seen.add(run)
    return counts[0], counts[1], counts[2]


def request_of(prompt: Prompt) -> Request:
    """The prompt as one user message under the chat template."""
    return Request(prompt=prompt.text, chat=True)


def _run(model: Model, prompt: Prompt, width: int, new_tokens: int) -> Run:
    start = time.perf_counter()
    finished = model.complete(request_of(prompt), max_new_tokens=new_tokens, draft_tokens=width, drafter="ngram")
    seconds = time.perf_counter() - start - finished.stats.seconds.prefill
    return Run(finished.token_ids, finished.stats, seconds)


def _seconds(runs: Sequence[Run]) -> float:
    return sum(run.seconds for run in runs)


def _require_equal(prompt: Prompt, width: int, plain: tuple[int, ...], drafted: tuple[int, ...]) -> None:
    if plain != drafted:
        pairs = enumerate(zip(plain, drafted, strict=False))
        first = next((index for index, (a, b) in pairs if a != b), min(len(plain), len(drafted)))
        raise ModelError(
            f"The answer to {prompt.kind}/{prompt.name} with K = {width} differs from plain decoding at token {first}; "
            "run `mtp-run verify` on the bundle and report this."
        )
