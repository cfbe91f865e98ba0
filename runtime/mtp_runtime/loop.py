"""The algorithm: prefill, then draft, verify, accept, commit, emit until something ends it.

Where the backend does a whole cycle by itself, the loop only chooses K and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from mtp_engines.engine import CycleSequences, Ids, Sequences, Verified
from mtp_engines.errors import NumericsError
from mtp_runtime.acceptance import Acceptor, GreedyAcceptor
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.ending import Ending
from mtp_runtime.events import Emitted, Event, Finished
from mtp_runtime.policy import DraftPolicy
from mtp_runtime.sampling.logprobs import TokenLogprobs
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
    acceptor: Acceptor = field(default_factory=GreedyAcceptor)

    def scored(self, sequences: Sequences) -> Callable[[Ids, int], Verified]:
        """The verify of these sequences, with logits if the acceptor needs them."""
        return partial(sequences.verify, logits=True) if self.acceptor.needs_logits else sequences.verify


@dataclass(frozen=True)
class Block:
    """What is emitted at once, and its log-probabilities if they were asked for."""

    tokens: list[int]
    logprobs: tuple[TokenLogprobs, ...] | None = None


def run(prompt: list[int], parts: Parts) -> Iterator[Event]:
    """Generate from a prompt.

    Tokens are emitted after their rows are committed. Between cycles the target has consumed every
    token but the newest, `pending`; an exception in a cycle leaves the committed state as it was.

    Yields:
        `Emitted` for prefill and for each cycle, then `Finished`.
    """
    drafter, ending, stats, done = parts.drafter, parts.ending, parts.stats, parts.acceptor.completion
    emitted: list[int] = []
    scores: list[TokenLogprobs] = []

    def emit(block: Block) -> Emitted:
        emitted.extend(block.tokens)
        scores.extend(block.logprobs or ())
        return Emitted(tuple(block.tokens), ending.text.take(), block.logprobs, done.index)

    if ending.remaining(0) > 0 or parts.acceptor.scores_prompt:
        first = _prefill(prompt, parts) if parts.cycles is None else _device_prefill(prompt, parts)
        if ending.remaining(0) > 0:
            yield emit(first)
    while ending.reason is None and ending.remaining(len(emitted)) > 0:
        chosen, room = parts.policy.choose(stats.cycles), ending.remaining(len(emitted))
        asked = min(chosen, room - 1)
        if parts.cycles is not None:
            # Always the whole K, since a captured cycle has one; what is more than may be emitted is dropped.
            cycle = parts.cycles.sequences.cycle(chosen)
            draft, block = cycle.draft[0][: room - 1], Block(ending.cut(cycle.emitted[0][:room]))
        else:
            draft, block = _host_cycle(asked, emitted[-1], parts)
        accepted = _delivered(draft, block.tokens)
        parts.policy.observe(len(draft), accepted)
        stats.add_cycle(len(draft), accepted, len(block.tokens), drafter.source, asked)
        yield emit(block)
    rest = ending.text.finish()
    if rest:
        yield Emitted((), rest, () if parts.acceptor.scores_output else None, done.index)
    yield Finished(
        tuple(emitted),
        ending.full_text,
        ending.reason or "length",
        len(prompt),
        stats,
        done,
        tuple(scores) if parts.acceptor.scores_output else None,
        parts.acceptor.prompt_logprobs,
    )


def _host_cycle(draft_tokens: int, pending: int, parts: Parts) -> tuple[list[int], Block]:
    """Draft, verify, accept and commit: what was proposed, and what is emitted."""
    draft, verified = _verify(parts, pending, parts.drafter.propose(draft_tokens))
    block = parts.ending.cut(parts.acceptor.accept(draft, verified))
    # The rows of the pending token and of every emitted one but the last have been consumed.
    parts.sequences.commit(np.array([len(block)]))
    parts.drafter.observe(np.array(block), verified.hidden[0, : len(block)])
    return draft, Block(block, parts.acceptor.emit(block, verified))


def _device_prefill(prompt: list[int], parts: Parts) -> Block:
    """Consume the prompt where the cycles will run."""
    assert parts.cycles is not None
    first = parts.cycles.sequences.prefill(np.array([prompt], np.int64), drafting=parts.cycles.drafting)
    return Block(parts.ending.cut([int(first[0])]))


def _prefill(prompt: list[int], parts: Parts) -> Block:
    """Consume the prompt in chunks; the first token."""
    acceptor = parts.acceptor
    tokens: Ids = np.array([prompt], np.int64)
    count = len(prompt)
    for start in range(0, count, parts.prefill_chunk):
        end = min(start + parts.prefill_chunk, count)
        rows = end - start if acceptor.scores_prompt else int(end == count)
        verified = parts.scored(parts.prefill)(tokens[:, start:end], rows)
        parts.prefill.commit(np.array([end - start]))
        following = tokens[0, start + 1 : end + 1]
        acceptor.observe_prompt(following, verified)
        if end == count:
            first = acceptor.accept([], verified)
            following = np.append(following, first)
        parts.drafter.observe(following, verified.hidden[0])
    if parts.ending.remaining(0) == 0:
        return Block([])
    scores = acceptor.emit(
        first, replace(verified, logits=None if verified.logits is None else verified.logits[:, -1:])
    )
    return Block(parts.ending.cut(first), scores)


def _verify(parts: Parts, pending: int, draft: list[int]) -> tuple[list[int], Verified]:
    """Run the target over the pending token and the draft; without the draft if that makes no numbers.

    A draft token can drive the target to infinity where the right token would not, and attention spreads
    it to the rows before. Plain decoding never sees that token, so neither may this.
    """
    verify = parts.scored(parts.sequences)
    try:
        return draft, verify(np.array([[pending, *draft]]), len(draft) + 1)
    except NumericsError:
        if not draft:
            raise
        return [], verify(np.array([[pending]]), 1)


def _delivered(draft: list[int], block: list[int]) -> int:
    """How many draft tokens are in the block: all but the bonus token, or all if an end cut it off."""
    kept = 0
    while kept < min(len(draft), len(block)) and draft[kept] == block[kept]:
        kept += 1
    return kept
