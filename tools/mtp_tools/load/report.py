"""Rounds as figures: one object for JSON, and a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from mtp_tools.load.blocks import AUTO, FIXED, OFF, Block, Level, Round, differing
from mtp_tools.load.latency import latencies

LIMIT = 0.95
"""`auto` may be no slower than this share of the better of fixed and off."""
_HEAD = (
    "at once | drafts | tok/s (least .. most) | tok per processor second | first token ms P50 / P99 | "
    "inter-token ms P50 / P99 | inter-chunk ms P50 / P99 | acceptance | errors"
)


def level_dict(level: Level, rounds: Sequence[Round]) -> dict[str, Any]:
    """What one level of concurrency measured."""
    return {
        "concurrency": level.concurrency,
        "arrivals_per_s": level.rate,
        "policies": {name: _policy_dict([found[name] for found in rounds]) for name in rounds[0]},
        "auto_over_better": auto_over_better(rounds),
        "auto_over_better_by_cpu": auto_over_better_by_cpu(rounds),
        "auto_limit": LIMIT,
        "answers_that_differ": [[number, ask] for number, found in enumerate(rounds) for ask in differing(found)],
    }


def auto_over_better(rounds: Sequence[Round]) -> dict[str, Any]:
    """Speed of auto over that of the better of fixed and off, which is so by its median; the ratio round by round."""
    return _over_better(rounds, lambda block: block.tokens_per_s)


def auto_over_better_by_cpu(rounds: Sequence[Round]) -> dict[str, Any] | None:
    """The same for tokens over processor time; None if that is not known."""
    if any(block.tokens_per_cpu_s is None for found in rounds for block in found.values()):
        return None
    return _over_better(rounds, lambda block: block.tokens_per_cpu_s or 0.0)


def _over_better(rounds: Sequence[Round], speed: Callable[[Block], float]) -> dict[str, Any]:
    better = max((FIXED, OFF), key=lambda name: median(speed(found[name]) for found in rounds))
    ratios = [speed(found[AUTO]) / max(speed(found[better]), 1e-9) for found in rounds]
    return {"better": better, **_spread(ratios), "holds": median(ratios) >= LIMIT}


def table(levels: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines in Markdown."""
    yield f"| {_HEAD} |"
    yield "|" + "---|" * (_HEAD.count("|") + 1)
    for level in levels:
        for name, one in level["policies"].items():
            cells = [
                str(level["concurrency"]),
                name,
                *(_range(one[figure]) for figure in ("tokens_per_s", "tokens_per_cpu_s")),
                *(_pair(one[figure]) for figure in ("first_token_ms", "inter_token_ms", "inter_chunk_ms")),
                "-" if one["acceptance_rate"] is None else f"{one['acceptance_rate']:.3f}",
                str(len(one["errors"])),
            ]
            yield f"| {' | '.join(cells)} |"
    yield ""
    for level in levels:
        for name, what in (("auto_over_better", "as fast"), ("auto_over_better_by_cpu", "as fast by processor time")):
            ratio = level[name]
            if ratio is not None:
                yield (
                    f"{level['concurrency']} at once: auto is {ratio['median']:.3f} ({ratio['least']:.3f} .. "
                    f"{ratio['most']:.3f}) times {what} as {ratio['better']}, the better of fixed and off; the limit "
                    f"is {LIMIT}, which {'holds' if ratio['holds'] else 'DOES NOT HOLD'}"
                )


def faults(levels: Sequence[dict[str, Any]]) -> list[str]:
    """What should not have happened, whatever the speed."""
    found = []
    for level in levels:
        for name, one in level["policies"].items():
            found += [f"{level['concurrency']} at once, {name}: {error}" for error in one["errors"]]
        for number, ask in level["answers_that_differ"]:
            found.append(f"{level['concurrency']} at once, round {number}: request {ask} was not answered alike by all")
    return found


def _policy_dict(blocks: Sequence[Block]) -> dict[str, Any]:
    timelines = [one for block in blocks for one in block.timelines]
    drafted, accepted = sum(block.drafted for block in blocks), sum(block.accepted for block in blocks)
    by_cpu = [block.tokens_per_cpu_s for block in blocks if block.tokens_per_cpu_s is not None]
    return {
        "tokens_per_cpu_s": _spread(by_cpu) if by_cpu else None,
        "tokens_per_s": _spread([block.tokens_per_s for block in blocks]),
        **latencies(timelines),
        "requests": len(timelines),
        "tokens": sum(one.tokens for one in timelines),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / drafted if drafted else None,
        "errors": [error for block in blocks for error in block.errors],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "most": max(values)}


def _range(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['median']:.0f} ({figures['least']:.0f} .. {figures['most']:.0f})"


def _pair(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['p50']:.1f} / {figures['p99']:.1f}"
