"""What a generation did: counts of cycles and drafts, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seconds:
    """Wall time by part. Draft includes the head's catching up with the prompt; greedy acceptance is not counted."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """Of all parts."""
        return self.prefill + self.draft + self.verify + self.accept + self.commit


@dataclass
class Stats:
    """Counts over the cycles of one generation. The token that prefill emits belongs to no cycle.

    Attributes:
        cycles: draft-verify-commit rounds.
        drafted: draft tokens proposed.
        accepted: draft tokens kept and delivered; what an end token or a stop text cut off is not counted.
        proposed_by_position: cycles that proposed a draft[i].
        reached_by_position: cycles that proposed draft[i] and kept every draft before it.
        accepted_by_position: cycles that kept draft[i].
        emitted_histogram: emitted tokens in a cycle -> number of such cycles.
        draft_tokens_chosen: K -> number of cycles that were to draft so many; a drafter may have proposed fewer.
        drafter: the name of the drafter; None if a tool brought its own, or if several generations differ.
        drafted_by_source: `drafted` by the name of what made the draft; a lookup before another has two.
        accepted_by_source: `accepted` in the same way.
        rescued: cycles in which a branch of a tree draft was accepted further than the chain.
        seconds: wall time by part.
    """

    cycles: int = 0
    drafted: int = 0
    accepted: int = 0
    proposed_by_position: list[int] = field(default_factory=list)
    reached_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    emitted_histogram: dict[int, int] = field(default_factory=dict)
    draft_tokens_chosen: dict[int, int] = field(default_factory=dict)
    seconds: Seconds = field(default_factory=Seconds)
    drafter: str | None = None
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    rescued: int = 0

    def add_cycle(self, drafted: int, accepted: int, emitted: int, source: str = "", chosen: int | None = None) -> None:
        """Count one cycle; `source` made its draft, of which `chosen` tokens were asked for; None: as many as came."""
        self.cycles += 1
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self.drafted_by_source[source] = self.drafted_by_source.get(source, 0) + drafted
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + accepted
        longest = max(drafted, len(self.proposed_by_position))
        for counts, number in (
            (self.proposed_by_position, drafted),
            (self.reached_by_position, min(accepted + 1, drafted)),
            (self.accepted_by_position, accepted),
        ):
            counts.extend([0] * (longest - len(counts)))
            for position in range(number):
                counts[position] += 1
        asked = drafted if chosen is None else chosen
        for histogram, value in ((self.emitted_histogram, emitted), (self.draft_tokens_chosen, asked)):
            histogram[value] = histogram.get(value, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Rates are None where nothing was proposed.

        acceptance_rate is accepted / drafted. acceptance_by_position[i] is the share of cycles that kept
        draft[i] among those that proposed it; conditional_by_position[i] is that share among those of them
        that kept every draft before it. emitted_per_cycle counts the bonus token and not the prefill token.
        """
        emitted = sum(length * count for length, count in self.emitted_histogram.items())
        kept, proposed = self.accepted_by_position, self.proposed_by_position
        return {
            "cycles": self.cycles,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_by_position": kept,
            "proposed_by_position": proposed,
            "emitted_histogram": _by_number(self.emitted_histogram),
            "draft_tokens_chosen": _by_number(self.draft_tokens_chosen),
            "acceptance_rate": _ratio(self.accepted, self.drafted),
            "acceptance_by_position": [_ratio(k, n) for k, n in zip(kept, proposed, strict=True)],
            "conditional_by_position": [_ratio(k, n) for k, n in zip(kept, self.reached_by_position, strict=True)],
            "emitted_per_cycle": _ratio(emitted, self.cycles),
            "drafter": self.drafter,
            "drafted_by_source": self.drafted_by_source,
            "accepted_by_source": self.accepted_by_source,
            "rescued": self.rescued,
            "seconds": vars(self.seconds),
        }


def merge(parts: list[Stats]) -> Stats:
    """Sum of several generations."""
    names = {part.drafter for part in parts}
    total = Stats(drafter=names.pop() if len(names) == 1 else None)
    for part in parts:
        total.cycles += part.cycles
        total.drafted += part.drafted
        total.accepted += part.accepted
        total.rescued += part.rescued
        for name in ("proposed_by_position", "reached_by_position", "accepted_by_position"):
            ours, theirs = getattr(total, name), getattr(part, name)
            ours.extend([0] * (len(theirs) - len(ours)))
            for position, count in enumerate(theirs):
                ours[position] += count
        for name in ("emitted_histogram", "draft_tokens_chosen", "drafted_by_source", "accepted_by_source"):
            sums = getattr(total, name)
            for key, count in getattr(part, name).items():
                sums[key] = sums.get(key, 0) + count
        for name, value in vars(part.seconds).items():
            setattr(total.seconds, name, getattr(total.seconds, name) + value)
    return total


def _by_number(histogram: dict[int, int]) -> dict[str, int]:
    return {str(number): count for number, count in sorted(histogram.items())}


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
