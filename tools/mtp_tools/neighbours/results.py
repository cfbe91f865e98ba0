"""From answers to figures: medians, spreads, and our ratios to the best neighbour. No clock is read here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtp_tools.bench.summary import Spread, spread
from mtp_tools.neighbours.contenders import GROUPS
from mtp_tools.neighbours.protocol import Reply
from mtp_tools.neighbours.rounds import Case

FIGURES: dict[str, Callable[[Reply], float]] = {
    "prefill_tokens_per_s": lambda reply: reply.prefill_tokens_per_s,
    "decode_tokens_per_s": lambda reply: reply.decode_tokens_per_s,
    "request_s": lambda reply: reply.total_s,
}
_COMPARED = (
    ("prefill tok/s", "prefill_tokens_per_s", True),
    ("decode tok/s, plain", "decode_tokens_per_s", True),
    ("whole request, plain, s", "request_s", True),
    ("decode tok/s, best K", "decode_tokens_per_s", False),
    ("whole request, best K, s", "request_s", False),
)
_SMALLER_WINS = ("request_s",)


@dataclass(frozen=True)
class Row:
    """One contender with one K.

    Attributes:
        over_plain: its decoding speed over that of its own K = 0, round by round; None if that is missing.
    """

    case: Case
    figures: dict[str, Spread]
    over_plain: Spread | None
    peak_bytes: int
    accepted: int | None
    drafted: int | None


@dataclass(frozen=True)
class Comparison:
    """One figure of one group: our best case against the best of the neighbours.

    Attributes:
        ratio: above 1 where ours is better, round by round.
    """

    group: str
    what: str
    ours: Row
    theirs: Row
    figure: str
    ratio: Spread


def rows_of(cases: Sequence[Case]) -> list[Row]:
    """Of every case that answered in a round."""
    return [_row(case, cases) for case in cases if case.replies]


def compare(rows: Sequence[Row]) -> Iterator[Comparison]:
    """Ours against the best neighbour, wrong answers and all: a neighbour is never left out for being fast."""
    for group in GROUPS:
        for what, figure, plain in _COMPARED:
            fitting = [row for row in rows if row.case.contender.group == group]
            if plain:
                fitting = [row for row in fitting if row.case.draft_tokens == 0]
            ours = [row for row in fitting if row.case.contender.is_ours]
            theirs = [row for row in fitting if not row.case.contender.is_ours]
            if ours and theirs:
                best = _best(ours, figure), _best(theirs, figure)
                values = _ratios(best[0].case, best[1].case, figure)
                if values:
                    yield Comparison(group, what, *best, figure, spread(values))


def row_dict(row: Row) -> dict[str, Any]:
    """A row for JSON, with every answer of every round."""
    case = row.case
    return {
        "engine": case.contender.engine.name,
        "weights": case.contender.weights,
        "group": case.contender.group,
        "draft_tokens": case.draft_tokens,
        "figures": {name: asdict(value) for name, value in row.figures.items()},
        "decode_over_plain": None if row.over_plain is None else asdict(row.over_plain),
        "peak_bytes": row.peak_bytes,
        "drafted": row.drafted,
        "accepted": row.accepted,
        "wrong_at": case.wrong_at,
        "failure": case.failure,
        "rounds": [
            None if reply is None else {"first_s": reply.first_s, "total_s": reply.total_s, "ids": list(reply.ids)}
            for reply in case.rounds
        ],
    }


def comparison_dict(found: Comparison) -> dict[str, Any]:
    """A comparison for JSON."""
    sides = {"ours": found.ours, "neighbour": found.theirs}
    return {
        "group": found.group,
        "what": found.what,
        **{
            name: {
                "name": row.case.contender.name,
                "draft_tokens": row.case.draft_tokens,
                "median": row.figures[found.figure].median,
                "wrong_at": row.case.wrong_at,
            }
            for name, row in sides.items()
        },
        "ratio": asdict(found.ratio),
    }


def _row(case: Case, cases: Sequence[Case]) -> Row:
    plain = next(other for other in cases if other.entry is case.entry and other.draft_tokens == 0)
    ratios = _ratios(case, plain, "decode_tokens_per_s")
    last = case.replies[-1]
    return Row(
        case,
        {name: spread([figure(reply) for reply in case.replies]) for name, figure in FIGURES.items()},
        spread(ratios) if ratios and case is not plain else None,
        max(reply.peak_bytes for reply in case.replies),
        last.accepted if case.draft_tokens else None,
        last.drafted if case.draft_tokens else None,
    )


def _best(rows: Sequence[Row], figure: str) -> Row:
    choose = min if figure in _SMALLER_WINS else max
    return choose(rows, key=lambda row: row.figures[figure].median)


def _ratios(ours: Case, theirs: Case, figure: str) -> list[float]:
    """Of the rounds in which both answered."""
    value = FIGURES[figure]
    pairs = zip(ours.rounds, theirs.rounds, strict=True)
    found = [value(a) / value(b) for a, b in pairs if a is not None and b is not None]
    return [1 / ratio for ratio in found] if figure in _SMALLER_WINS else found
