"""Single runs of a verification: plain decoding with its states, and runs compared against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_engines.engine import Floats, Ids, Sequences, Verified
from mtp_runtime.api import Model
from mtp_runtime.drafters.none import NoDrafter
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.ending import Ending
from mtp_runtime.events import Emitted, Finished
from mtp_runtime.policy import FixedPolicy
from mtp_runtime.stats import Stats
from mtp_runtime.text import TextStream
from mtp_runtime.verification import VerifyMode
from mtp_tools.verify.digests import Digests, digest, first_difference, state_digests

Wrap = Callable[[Sequences], Sequences]


@dataclass(frozen=True)
class Plain:
    """Plain decoding: its tokens, digests of the state at every committed length and of every hidden row."""

    prompt: list[int]
    ids: tuple[int, ...]
    states: dict[int, Digests]
    hidden: list[bytes]


@dataclass(frozen=True)
class Call:
    """A verify whose rows were kept, at least some of them: int64[1, rows] tokens, how many were scored and kept."""

    tokens: Ids
    logit_rows: int
    kept: int


@dataclass(frozen=True)
class Outcome:
    """A run against plain decoding; all differences are None if it is lossless."""

    stats: Stats
    ids: tuple[int, ...]
    calls: list[Call]
    """What the loop asked of the engine, so that it can be asked again."""
    first_token: int | None
    """Index of the first emitted token that differs."""
    first_state: tuple[int, str] | None
    """Committed length and name of the first state that differs."""
    first_hidden: int | None
    """Position of the first committed row whose hidden state differs."""

    @property
    def holds(self) -> bool:
        return self.first_token is None and self.first_state is None and self.first_hidden is None


class HiddenRecorder:
    """A drafter that remembers the digest of every committed hidden row it is shown, and passes all on."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.digests: list[bytes] = []

    @property
    def source(self) -> str:
        """That of the drafter."""
        return self._inner.source

    def observe(self, tokens: Ids, hidden: Floats) -> None:
        """Record each row."""
        self.digests += [digest(row) for row in hidden]
        self._inner.observe(tokens, hidden)

    def propose(self, draft_tokens: int) -> list[int]:
        """Whatever the drafter proposes."""
        return self._inner.propose(draft_tokens)


class Taped:
    """Sequences that remember what was asked of them."""

    def __init__(self, inner: Sequences) -> None:
        self._inner = inner
        self._newest: tuple[Ids, int] | None = None
        self.calls: list[Call] = []
        self.lengths = inner.lengths
        self.draft, self.logits, self.snapshot, self.reset = inner.draft, inner.logits, inner.snapshot, inner.reset

    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Remembered once it is committed; a draft that makes no numbers is verified twice."""
        self._newest = tokens.copy(), logit_rows
        return self._inner.verify(tokens, logit_rows, logits=logits)

    def commit(self, rows: Ids) -> None:
        """Complete the call."""
        assert self._newest is not None, "commit comes after verify"
        self.calls.append(Call(*self._newest, int(rows[0])))
        self._inner.commit(rows)


def run_plain(model: Model, prompt: list[int], new_tokens: int, *, with_states: bool = True) -> Plain:
    """Decode without drafts and remember every state."""
    sequences = model.engine.sequences()
    states: dict[int, Digests] = {}
    recorder = HiddenRecorder(NoDrafter())
    for event in model.run(prompt, sequences, recorder, FixedPolicy(0), _ending(new_tokens)):
        if isinstance(event, Emitted) and with_states:
            states[int(sequences.lengths[0])] = state_digests(sequences)
        elif isinstance(event, Finished):
            return Plain(prompt, event.token_ids, states, recorder.digests)
    raise AssertionError("a generation ends with Finished")


def run_against(
    model: Model,
    plain: Plain,
    draft_tokens: int,
    drafter: Drafter | None = None,
    wrap: Wrap | None = None,
    verify: VerifyMode = "rows",
) -> Outcome:
    """Decode with drafts and compare tokens, and after every cycle the committed state, with plain decoding.

    Args:
        drafter: None drafts with the bundle's own head.
        wrap: puts a fault between loop and engine, for controls.
        verify: one of `VERIFY_MODES`.
    """
    inner = model.engine.sequences()
    sequences = Taped(wrap(inner) if wrap else inner)
    recorder = HiddenRecorder(drafter or model.drafter(sequences))
    first_state: tuple[int, str] | None = None
    policy, ending = FixedPolicy(draft_tokens), _ending(len(plain.ids))
    for event in model.run(plain.prompt, sequences, recorder, policy, ending, verify=verify):
        length = int(inner.lengths[0])
        if isinstance(event, Finished):
            first_token, first_hidden = _first(event.token_ids, plain.ids), _first(recorder.digests, plain.hidden)
            return Outcome(event.stats, event.token_ids, sequences.calls, first_token, first_state, first_hidden)
        if first_state is None and event.token_ids and plain.states:
            name = first_difference(state_digests(inner), plain.states.get(length, {"length": b""}))
            first_state = (length, name) if name else None
    raise AssertionError("a generation ends with Finished")


class CommitsEverything:
    """A deliberate fault: every staged row is kept, accepted or not, though the length is claimed as accepted."""

    def __init__(self, inner: Sequences) -> None:
        self._inner = inner
        self._rows = 0
        self.lengths = inner.lengths
        self.draft, self.logits, self.snapshot, self.reset = inner.draft, inner.logits, inner.snapshot, inner.reset

    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Remember how many rows were staged."""
        self._rows = tokens.shape[1]
        return self._inner.verify(tokens, logit_rows, logits=logits)

    def commit(self, rows: Ids) -> None:
        """Run the recurrence over all rows, then claim the accepted length."""
        self._inner.commit(np.full_like(rows, self._rows))
        self._inner.lengths -= self._rows - rows


class KeepsOneRowTooMany(CommitsEverything):
    """A fault for models without a recurrent state: a rejected row stays in the caches, length included."""

    def commit(self, rows: Ids) -> None:
        """Keep one more than was accepted, where there is one."""
        self._inner.commit(np.minimum(rows + 1, self._rows))


def _ending(limit: int) -> Ending:
    return Ending(limit, (), TextStream(None, ()))


def _first(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """Index of the first difference, a missing end included."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
