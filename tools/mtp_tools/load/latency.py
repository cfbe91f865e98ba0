"""From the times of chunks to latencies of tokens.

A chunk of a stream has the tokens of one cycle or several, so the gap between two chunks is not the time of a token.
The time of a gap is shared by the tokens that end it; tokens that come together with the first one took none. So the
mean over the tokens behind the first is (last - first) / (tokens - 1) exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass
class Timeline:
    """When the tokens of one answer came.

    Attributes:
        sent: when the request was sent, in seconds of any clock.
        due: when it arrived; later ones wait on the client's side if enough are under way.
        chunks: when each chunk with tokens came, and how many it had.
        ended: when the response was over.
    """

    sent: float
    due: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return sum(count for _, count in self.chunks)

    @property
    def first_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.chunks[0][0] - self.sent

    def token_gaps_s(self) -> list[float]:
        """Seconds of each token behind the first."""
        gaps = [0.0] * (self.chunks[0][1] - 1)
        for (before, _), (now, count) in pairwise(self.chunks):
            gaps += [(now - before) / count] * count
        return gaps

    def chunk_gaps_s(self) -> list[float]:
        """Seconds between chunks, however many tokens they have."""
        times = [time for time, _ in self.chunks]
        return [later - earlier for earlier, later in pairwise(times)]


def latencies(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """P50 and P99 over all answers, in milliseconds; names say of what. None where there was nothing to measure."""
    told = [one for one in timelines if one.chunks]
    return {
        "first_token_ms": _percentiles([one.first_s for one in told]),
        "first_token_from_arrival_ms": _percentiles([one.chunks[0][0] - one.due for one in told]),
        "inter_token_ms": _percentiles([gap for one in told for gap in one.token_gaps_s()]),
        "inter_chunk_ms": _percentiles([gap for one in told for gap in one.chunk_gaps_s()]),
    }


def busy_seconds(timelines: Sequence[Timeline]) -> float:
    """Seconds in which at least one request was under way."""
    total, until = 0.0, float("-inf")
    for one in sorted(timelines, key=lambda line: line.sent):
        total += max(one.ended - max(one.sent, until), 0.0)
        until = max(until, one.ended)
    return total


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, (50, 99))
    return {"p50": float(p50) * 1e3, "p99": float(p99) * 1e3}
