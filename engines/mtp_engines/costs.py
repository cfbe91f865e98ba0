"""What the parts of a cycle cost on this machine, measured on the engine itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import numpy as np

from mtp_engines.engine import CycleSequences, Engine, Floats, Ids, Sequences, Verified
from mtp_engines.errors import NumericsError

TYPICAL_ROWS = 2
"""Rows that the head catches up with before a measured draft; a cycle leaves it one to K + 1."""
_CONTEXT = 32
"""Committed rows before the measured ones."""
_BACKLOG = 32
"""Rows of the run that shows what a further row costs the head."""
_LEAST_ROUNDS, _MOST_ROUNDS, _ENOUGH_SECONDS = 3, 15, 2.0
"""Rounds go on until the seconds are spent; at least three, so that a median leaves an outlier out."""

Clock = Callable[[], float]
Samples = dict[tuple[str, int], list[float]]
"""Part of a cycle and its number of rows or draft tokens -> seconds in every round."""


@dataclass(frozen=True)
class CycleCosts:
    """Seconds of the parts of a cycle, for each of the answers that run together.

    Of a backend's own cycles, all is under `verify`.

    Attributes:
        verify: of 1, 2, ... rows; with n entries, up to n - 1 tokens can be drafted.
        draft: of 1, 2, ... tokens by the bundle's head, which first catches up with `TYPICAL_ROWS` rows; zeros where
            there is no head, or where cycles are whole.
        catch_up: of each further row that the head catches up with.
        commit: after a rejection.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]
    catch_up: float
    commit: float

    @property
    def max_draft_tokens(self) -> int:
        """Largest K that was measured."""
        return len(self.draft)

    def is_sound(self) -> bool:
        """Whether the numbers can be those of a measurement."""
        seconds = (*self.verify, *self.draft, self.catch_up, self.commit)
        finite = all(math.isfinite(value) and value >= 0 for value in seconds)
        return finite and len(self.verify) == len(self.draft) + 1 and min(self.verify) > 0


def measure_costs(
    engine: Engine, *, answers: int = 1, whole: bool = False, clock: Clock = time.perf_counter
) -> CycleCosts:
    """Time every part once in each round, so that what disturbs the machine for a while meets all of them.

    Args:
        answers: how many run together, up to the bundle's largest batch; what each of them costs is its share.
        whole: measure the backend's own cycles instead of the calls that the host makes.

    Returns:
        Medians of the rounds.
    """
    sequences = engine.sequences(answers)
    if whole:
        assert isinstance(sequences, CycleSequences), "only a backend with whole cycles is asked for them"
        probe: _Parts | _Cycles = _Cycles(engine, sequences)
    else:
        probe = _Parts(engine, sequences)
    probe.round({}, clock)  # The first run of each width allocates and may capture.
    samples: Samples = {}
    start = clock()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and clock() - start > _ENOUGH_SECONDS:
            break
        probe.round(samples, clock)
    return probe.costs({part: median(values) for part, values in samples.items()})


class _Parts:
    """The calls that the host makes: verify, commit and draft."""

    def __init__(self, engine: Engine, sequences: Sequences) -> None:
        self._sequences, self._most = sequences, engine.limits.max_draft_tokens
        self._answers = len(sequences.lengths)
        self._room, self._has_head = engine.limits.max_model_len, engine.spec.mtp is not None
        self._widest = min(self._most + 1, max(self._room - 1, 1))
        self._context = max(1, min(_CONTEXT, self._room - self._widest - 1, engine.limits.prefill_chunk))
        self._vocabulary = engine.spec.vocab_size
        self._hidden: Floats = np.zeros((1, 0, 0), np.float32)
        self._consumed = 0
        self._begin()

    def round(self, samples: Samples, clock: Clock) -> None:
        for rows in _grid(self._widest):
            if int(self._sequences.lengths[0]) + rows > self._room:
                self._begin()
            verified: list[Verified] = []
            with suppress(NumericsError), _Timed(samples, ("verify", rows), clock):
                verified.append(self._sequences.verify(self._ids(rows), rows))
            if verified and rows == self._widest > 1:
                with _Timed(samples, ("commit", 1), clock):
                    self._sequences.commit(np.ones(self._answers, np.int64))
        if not self._has_head:
            return
        for rows in _grid(self._most + 1)[1:]:
            self._draft(("draft", rows - 1), TYPICAL_ROWS, rows - 1, samples, clock)
        self._draft(("backlog", 1), _BACKLOG, 1, samples, clock)

    def costs(self, seconds: dict[tuple[str, int], float]) -> CycleCosts:
        draft = _line(seconds, "draft", range(1, self._most + 1)) if self._has_head else (0.0,) * self._most
        further = self._rows(_BACKLOG) - self._rows(TYPICAL_ROWS)
        slope = (seconds["backlog", 1] - seconds["draft", 1]) / further if further and self._has_head else 0.0
        verify = _line(seconds, "verify", range(1, self._most + 2))
        each = tuple(tuple(value / self._answers for value in values) for values in (verify, draft))
        commit = seconds.get(("commit", 1), 0.0)
        return CycleCosts(each[0], each[1], max(slope, 0.0) / self._answers, commit / self._answers)

    def _draft(self, part: tuple[str, int], rows: int, tokens: int, samples: Samples, clock: Clock) -> None:
        rows = self._rows(rows)
        if self._consumed + rows + tokens > self._room:
            self._begin()
        hidden = self._hidden[:, :rows]
        with _Timed(samples, part, clock):
            self._sequences.draft(self._ids(rows), hidden, np.full(self._answers, rows), tokens)
        self._consumed += rows

    def _rows(self, wanted: int) -> int:
        return min(wanted, self._context)

    def _begin(self) -> None:
        """Consume the context anew; the head starts empty."""
        self._sequences.reset()
        self._consumed = 0
        self._hidden = self._sequences.verify(self._ids(self._context), 0).hidden.copy()
        self._sequences.commit(np.full(self._answers, self._context))

    def _ids(self, rows: int) -> Ids:
        return np.tile(np.arange(rows, dtype=np.int64) % self._vocabulary, (self._answers, 1))


class _Cycles:
    """Cycles that the backend does by itself; what they accept does not change what they cost."""

    def __init__(self, engine: Engine, sequences: CycleSequences) -> None:
        self._sequences, self._most = sequences, engine.limits.max_draft_tokens
        self._room, self._has_head = engine.limits.max_model_len, engine.spec.mtp is not None
        self._ids: Ids = np.arange(max(1, min(_CONTEXT, self._room - self._most - 1)), dtype=np.int64)[None]
        self._ids %= engine.spec.vocab_size
        self._begin()

    def round(self, samples: Samples, clock: Clock) -> None:
        for rows in _grid(self._most + 1 if self._has_head else 1):
            tokens = rows - 1
            if int(self._sequences.lengths[0]) + tokens + 1 > self._room:
                self._begin()
            with _Timed(samples, ("cycle", tokens), clock):
                self._sequences.cycle(tokens)

    def costs(self, seconds: dict[tuple[str, int], float]) -> CycleCosts:
        return CycleCosts(_line(seconds, "cycle", range(self._most + 1)), (0.0,) * self._most, 0.0, 0.0)

    def _begin(self) -> None:
        self._sequences.reset()
        self._sequences.prefill(self._ids, drafting=self._has_head)


def _grid(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ... and the last: few enough for a wide bundle, all of those that are usual."""
    found = [number for power in range(most.bit_length()) for number in (1 << power, 3 << power)]
    return sorted({number for number in found if number < most} | {most})


def _line(seconds: dict[tuple[str, int], float], part: str, wanted: range) -> tuple[float, ...]:
    """Measured values with straight lines between them; never falling, since more work takes no less time."""
    known = sorted(number for name, number in seconds if name == part)
    rising = np.maximum.accumulate([seconds[part, number] for number in known])
    return tuple(float(value) for value in np.interp(wanted, known, rising))


class _Timed:
    """Adds the seconds of a block to the samples of a part, also where the block ends with an error."""

    def __init__(self, samples: Samples, part: tuple[str, int], clock: Clock) -> None:
        self._values, self._clock = samples.setdefault(part, []), clock

    def __enter__(self) -> None:
        self._start = self._clock()

    def __exit__(self, *error: object) -> None:
        self._values.append(self._clock() - self._start)
