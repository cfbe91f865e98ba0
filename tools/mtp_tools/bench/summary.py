"""From rounds to figures: medians, spreads, ratios to plain decoding. No clock is read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mtp_runtime.stats import merge
from mtp_tools.bench.answers import Answer
from mtp_tools.bench.cases import PLAIN, Case
from mtp_tools.bench.measuring import Round

PARTS = ("draft", "verify", "commit")
_ONLY_WITH_DRAFTS = ("draft_ms", "first_draft_ms")
"""Plain decoding spends no more on these than a look at the clock, so a ratio would say nothing."""


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the rounds."""

    median: float
    least: float
    greatest: float


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        figures: name -> spread over the rounds; names end in their unit.
        ratios: the same names, over plain decoding in the same round; what plain decoding has none of is left out.
        stats: counts of one round; all rounds have the same.
    """

    case: Case
    figures: dict[str, Spread]
    ratios: dict[str, Spread]
    stats: dict[str, Any]


def summarise(rounds: Sequence[Round]) -> list[Row]:
    """One row for each case, in the order of the rounds."""
    plain = [figures_of(round_[PLAIN]) for round_ in rounds]
    rows = []
    for case, answers in rounds[0].items():
        found = [figures_of(round_[case]) for round_ in rounds]
        stats = merge([answer.stats for answer in answers]).as_dict()
        del stats["seconds"]
        rows.append(Row(case, _spreads(found), _spreads(_ratios(found, plain)), stats))
    return rows


def figures_of(answers: Sequence[Answer]) -> dict[str, float]:
    """Figures of one case in one round, over all of its prompts.

    Decoding is all cycles: the first draft, which lets the head read the prompt, is among them, and is told apart as
    `first_draft_ms`. `later_tokens_per_s` leaves the first cycle of every answer out. Milliseconds are means a cycle.
    `python_us_per_cycle` is a cycle without its calls into the engine; the median, since a cycle that another process
    interrupts says nothing of Python.
    """
    cycles = [cycle for answer in answers for cycle in answer.cycles]
    later = [cycle for answer in answers for cycle in answer.cycles[1:]]
    count, wall = len(cycles), sum(cycle.wall for cycle in cycles)
    figures = {
        "prefill_tokens_per_s": sum(a.prompt_tokens for a in answers) / sum(a.prefill_s for a in answers),
        "prefill_ms": 1e3 * sum(a.prefill_s for a in answers) / len(answers),
        "decode_tokens_per_s": sum(cycle.emitted for cycle in cycles) / wall,
        "cycle_ms": 1e3 * wall / count,
        "first_draft_ms": 1e3 * sum(a.cycles[0].draft for a in answers) / len(answers),
        "python_us_per_cycle": 1e6 * median(cycle.wall - cycle.engine for cycle in cycles),
    }
    if later:
        figures["later_tokens_per_s"] = sum(c.emitted for c in later) / sum(c.wall for c in later)
    return figures | {f"{part}_ms": 1e3 * sum(getattr(c, part) for c in cycles) / count for part in PARTS}


def spread(values: Sequence[float]) -> Spread:
    """Of one figure over the rounds."""
    return Spread(median(values), min(values), max(values))


def shares(seconds: Sequence[float], bandwidths: Sequence[float], size: int) -> Spread:
    """Of the time of a step, what reading `size` bytes takes at the bandwidth of its round."""
    return spread([size / bandwidth / spent for spent, bandwidth in zip(seconds, bandwidths, strict=True)])


def step_seconds(rounds: Sequence[Round]) -> list[float]:
    """Seconds of a step of plain decoding in each round."""
    return [figures_of(round_[PLAIN])["cycle_ms"] / 1e3 for round_ in rounds]


def _ratios(found: Sequence[Mapping[str, float]], plain: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    return [
        {
            name: value / base[name]
            for name, value in figures.items()
            if base.get(name) and name not in _ONLY_WITH_DRAFTS
        }
        for figures, base in zip(found, plain, strict=True)
    ]


def _spreads(found: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    names = [name for name in found[0] if all(name in figures for figures in found)]
    return {name: spread([figures[name] for figures in found]) for name in names}
