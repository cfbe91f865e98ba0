"""Whether the memory of a server stays where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

LEAST_SAMPLES = 120
"""A younger process still fills its caches."""
_COURSE = 40
_ALLOWED_BYTES, _ALLOWED_SHARE = 32 << 20, 0.03


@dataclass(frozen=True)
class Growth:
    """Of one process, from the second quarter of its life to the last one; the first quarter fills its caches.

    Attributes:
        before, after: bytes, the median of each of the two.
        most: bytes ever seen.
        samples: how often it was looked at.
        requests: answered in that life.
        course: bytes at about equal distances.
    """

    before: int
    after: int
    most: int
    samples: int
    requests: int
    course: tuple[int, ...] = ()

    @property
    def allowed(self) -> int:
        """Bytes that it may grow."""
        return max(_ALLOWED_BYTES, int(self.before * _ALLOWED_SHARE))

    @property
    def is_flat(self) -> bool:
        """Whether it grew no more than it may."""
        return self.after - self.before <= self.allowed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "growth_bytes": self.after - self.before, "allowed_bytes": self.allowed}


def growth_of(samples: Sequence[int], requests: int) -> Growth | None:
    """From samples at equal distances; None if there are too few to tell."""
    quarter = len(samples) // 4
    if len(samples) < LEAST_SAMPLES:
        return None
    before, after = median(samples[quarter : 2 * quarter]), median(samples[-quarter:])
    course = tuple(samples[:: max(len(samples) // _COURSE, 1)])
    return Growth(int(before), int(after), max(samples), len(samples), requests, course)
