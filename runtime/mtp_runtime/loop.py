"""The algorithm: prefill, then draft, verify, accept, commit, emit until something ends it.

Where the backend does a whole cycle by itself, the loop only chooses K and ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtp_engines.engine import CycleSequences, Ids, Sequences, Verified
from mtp_engines.errors import NumericsError
from mtp_runtime.acceptance import accept_greedy
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.ending import Ending
from mtp_runtime.events import Emitted, Event, Finished
from mtp_runtime.policy import DraftPolicy
from mtp_runtime.stats import Stats


@dataclass(frozen=True)
class WholeCycles:
    """Sequences whose backend drafts with the bundle's head, or not at all, and accepts greedily."""

    sequences: CycleSequences
    drafting: bool


@dataclass(frozen=True)
class Parts:
    """What one generation works with."""

    prefill: Sequences
    """The sequences as the prompt sees them; apart, so that its time can be counted apart."""
    sequences: Sequences
    drafter: Drafter
    policy: DraftPolicy
    ending: Ending
    stats: Stats
    prefill_chunk: int
    cycles: WholeCycles | None = None
    """The backend's own cycles, where they do what this generation wants."""


def run(prompt: list[int], parts: Parts) -> Iterator[Event]:
    """Generate from a prompt.

    Tokens are emitted after their rows are committed. Between cycles the target has consumed every
    token but the newest, `pending`; an exception in a cycle leaves the committed state as it was.

    Yields:
        `Emitted` for prefill and for each cycle, then `Finished`.
    """
    drafter, ending, stats = parts.drafter, parts.ending, parts.stats
    emitted: list[int] = []
    if ending.remaining(0) > 0:
        pending = _prefill(prompt, parts) if parts.cycles is None else _device_prefill(prompt, parts)
        emitted = ending.cut([pending])
        yield Emitted(tuple(emitted), ending.text.take())
    while ending.reason is None and ending.remaining(len(emitted)) > 0:
        chosen, room = parts.policy.choose(stats.cycles), ending.remaining(len(emitted))
        asked = min(chosen, room - 1)
        if parts.cycles is not None:
            # Always the whole K, since a captured cycle has one; what is more than may be emitted is dropped.
            cycle = parts.cycles.sequences.cycle(chosen)
            draft, block = cycle.draft[0][: room - 1], ending.cut(cycle.emitted[0][:room])
        else:
            draft, block = _host_cycle(asked, emitted[-1], parts)
        accepted = _delivered(draft, block)
        parts.policy.observe(len(draft), accepted)
        stats.add_cycle(len(draft), accepted, len(block), drafter.source, asked)
        emitted += block
        yield Emitted(tuple(block), ending.text.take())
    rest = ending.text.finish()
    if rest:
        yield Emitted((), rest)
    yield Finished(tuple(emitted), ending.full_text, ending.reason or "length", len(prompt), stats)


def _host_cycle(draft_tokens: int, pending: int, parts: Parts) -> tuple[list[int], list[int]]:
    """Draft, verify, accept and commit: what was proposed, and what is emitted."""
    draft, verified = _verify(parts.sequences, pending, parts.drafter.propose(draft_tokens))
    block = parts.ending.cut(accept_greedy(draft, verified.ids[0].tolist()))
    # The rows of the pending token and of every emitted one but the last have been consumed.
    parts.sequences.commit(np.array([len(block)]))
    parts.drafter.observe(np.array(block), verified.hidden[0, : len(block)])
    return draft, block


def _device_prefill(prompt: list[int], parts: Parts) -> int:
    """Consume the prompt where the cycles will run."""
    assert parts.cycles is not None
    first = parts.cycles.sequences.prefill(np.array([prompt], np.int64), drafting=parts.cycles.drafting)
    return int(first[0])


def _prefill(prompt: list[int], parts: Parts) -> int:
    """Consume the prompt in chunks and return the target's first token."""
    tokens: Ids = np.array([prompt], np.int64)
    count = len(prompt)
    for start in range(0, count, parts.prefill_chunk):
        end = min(start + parts.prefill_chunk, count)
        verified = parts.prefill.verify(tokens[:, start:end], 1 if end == count else 0)
        parts.prefill.commit(np.array([end - start]))
        following = tokens[0, start + 1 : end + 1]
        if end == count:
            following = np.append(following, verified.ids[0, 0])
        parts.drafter.observe(following, verified.hidden[0])
    return int(verified.ids[0, 0])


def _verify(sequences: Sequences, pending: int, draft: list[int]) -> tuple[list[int], Verified]:
    """Run the target over the pending token and the draft; without the draft if that makes no numbers.

    A draft token can drive the target to infinity where the right token would not, and attention spreads
    it to the rows before. Plain decoding never sees that token, so neither may this.
    """
    try:
        return draft, sequences.verify(np.array([[pending, *draft]]), len(draft) + 1)
    except NumericsError:
        if not draft:
            raise
        return [], sequences.verify(np.array([[pending]]), 1)


def _delivered(draft: list[int], block: list[int]) -> int:
    """How many draft tokens are in the block: all but the bonus token, or all if an end cut it off."""
    kept = 0
    while kept < min(len(draft), len(block)) and draft[kept] == block[kept]:
        kept += 1
    return kept
