"""From counts to shares with intervals, and to the speed that they let expect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from mtp_engines.costs import CycleCosts
from mtp_runtime.policy import expected_cycles
from mtp_runtime.stats import Stats
from mtp_tools.acceptance.teacher import TOPS, Counts

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Share:
    """`kept` of `trials`."""

    kept: int
    trials: int

    @property
    def rate(self) -> float | None:
        """None without a trial."""
        return self.kept / self.trials if self.trials else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval, which holds for independent trials; None without one."""
        if not self.trials:
            return None
        z2 = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2) ** 2
        count, rate = self.trials, self.kept / self.trials
        centre = (rate + z2 / (2 * count)) / (1 + z2 / count)
        half = math.sqrt(z2 * (rate * (1 - rate) / count + z2 / (4 * count**2))) / (1 + z2 / count)
        # Where none or all were kept, the border is 0 or 1; rounding alone puts it beside.
        return max(centre - half, 0.0) if self.kept else 0.0, min(centre + half, 1.0) if self.kept < count else 1.0


def conditional(stats: Stats) -> list[Share]:
    """By position: drafts that were kept, of those that were proposed and kept everywhere before."""
    return _shares(stats.accepted_by_position, stats.reached_by_position)


def of_proposed(stats: Stats) -> list[Share]:
    """By position: drafts that were kept, of those that were proposed."""
    return _shares(stats.accepted_by_position, stats.proposed_by_position)


def conditional_of(counts: Counts) -> list[Share]:
    """As `conditional`, teacher-forced."""
    return _shares(counts.kept, counts.reached)


def coverage_of(counts: Counts) -> dict[int, list[Share]]:
    """How many best tokens -> by position, places whose true token is among them."""
    return {top: _shares(within, counts.placed) for top, within in zip(TOPS, counts.within, strict=True)}


def _shares(kept: Sequence[int], trials: Sequence[int]) -> list[Share]:
    return [Share(one, count) for one, count in zip(kept, trials, strict=True)]


def drafting_share(stats: Stats) -> float:
    """Share of the cycles with room for a draft that had one; below 1 for a lookup, which may find nothing."""
    asked = sum(count for width, count in stats.draft_tokens_chosen.items() if width)
    return stats.proposed_by_position[0] / asked if asked and stats.proposed_by_position else 1.0


@dataclass(frozen=True)
class Expected:
    """A cycle with one K. What was never tried is None.

    Attributes:
        tokens: emitted, bonus token included.
        seconds: what it costs.
        speedup: tokens a second over those of K = 0.
        between: the speed-up if every rate were at the lower, and at the upper end of its interval.
    """

    draft_tokens: int
    tokens: float | None
    seconds: float | None
    speedup: float | None
    between: tuple[float, float] | None


def expectations(
    shares: Sequence[Share], costs: CycleCosts, widths: Sequence[int], drafting: float = 1.0
) -> list[Expected]:
    """What to expect of K = 0 and of every K in `widths`.

    Args:
        shares: conditional ones, by position; no more than the costs have.
        drafting: share of the cycles that have a draft; the others cost and emit what plain decoding does.
    """
    most = max(widths, default=0)
    padded = [*shares, *[Share(0, 0)] * (most - len(shares))][:most]
    middle = _cycles([share.rate or 0.0 for share in padded], costs, drafting)
    low, high = (_cycles([(share.interval or (0.0, 1.0))[end] for share in padded], costs, drafting) for end in (0, 1))
    found = []
    for width in sorted({0, *widths}):
        if not _is_known(padded[:width]):
            found.append(Expected(width, None, None, None, None))
            continue
        tokens, seconds, speedup = middle[width]
        found.append(Expected(width, tokens, seconds, speedup, (low[width][2], high[width][2])))
    return found


def best(expected: Sequence[Expected]) -> Expected:
    """The greatest speed-up; the smallest K of equal ones."""
    return max(expected, key=lambda one: (one.speedup or 0.0, -one.draft_tokens))


def _cycles(rates: Sequence[float], costs: CycleCosts, drafting: float) -> list[tuple[float, float, float]]:
    """Tokens, seconds and speed-up of K = 0, 1, ..."""
    cycles = expected_cycles(rates, costs)
    plain = cycles[0][1]
    found = []
    for drafted_tokens, drafted_seconds in cycles:
        tokens, seconds = 1 + drafting * (drafted_tokens - 1), plain + drafting * (drafted_seconds - plain)
        found.append((tokens, seconds, tokens * plain / seconds))
    return found


def _is_known(shares: Sequence[Share]) -> bool:
    """Whether every rate was seen; behind a position that keeps nothing the others do not matter."""
    for share in shares:
        if share.rate is None:
            return False
        if not share.kept:
            return True
    return True
