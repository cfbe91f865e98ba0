"""One answer of a benchmark, with the time of every cycle and of the calls into the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtp_engines.engine import Choose, CycleSequences, Floats, Ids, Sequences
from mtp_runtime.acceptance import Acceptor, GreedyAcceptor
from mtp_runtime.api import Model
from mtp_runtime.drafters.none import NoDrafter
from mtp_runtime.drafters.protocol import Drafter
from mtp_runtime.drafters.registry import head_kind, own_head
from mtp_runtime.ending import Ending
from mtp_runtime.events import Finished
from mtp_runtime.loop import Generation, Parts, WholeCycles
from mtp_runtime.policy import DraftPolicy, FixedPolicy
from mtp_runtime.request import AUTO
from mtp_runtime.stats import Seconds, Stats
from mtp_runtime.text import TextStream
from mtp_runtime.timing import Clock, TimedCycles, TimedDrafter, TimedSequences, TimedSlots, timed
from mtp_runtime.trees.tree import Tree
from mtp_runtime.trees.verification import PathAcceptor, TreeVerification
from mtp_runtime.verification import RowsTogether, Verification
from mtp_tools.bench.cases import Case
from mtp_tools.bench.forcing import forced_head

Wrap = Callable[[Sequences], Sequences]


@dataclass(frozen=True)
class CycleTime:
    """Seconds of one cycle.

    Attributes:
        wall: all of it, decoding of text included.
        draft: the drafter, its own Python included.
        engine: inside calls of the engine: head, verify and commit.
        emitted: tokens.
    """

    wall: float
    draft: float
    verify: float
    commit: float
    engine: float
    emitted: int


@dataclass(frozen=True)
class Answer:
    """One generation; prefill lasts until the first token was delivered."""

    token_ids: tuple[int, ...]
    prompt_tokens: int
    prefill_s: float
    cycles: tuple[CycleTime, ...]
    stats: Stats


@dataclass(frozen=True)
class Task:
    """A prompt, what follows it in plain decoding (empty before that is known), and how it is decoded.

    Attributes:
        host_loop: the host drafts, verifies and commits even where the backend has cycles of its own, since drafts
            are forced somewhere in the benchmark, and all of its cases have to be comparable.
        wrap: puts a fault between loop and engine, for controls.
        cpu_time: what this process spends on a CPU is measured, not what a clock on the wall shows.
    """

    prompt: list[int]
    continuation: Sequence[int]
    new_tokens: int
    seed: int = 0
    host_loop: bool = False
    wrap: Wrap | None = None
    cpu_time: bool = False


def answer(model: Model, task: Task, case: Case, clock: Clock = time.perf_counter) -> Answer:
    """Generate once. End tokens do not end it, so that every case emits the same number of tokens."""
    clock = time.process_time if task.cpu_time else clock
    stats, heads = Stats(), Seconds()
    inner = model.engine.sequences(1 + case.draft_branches)
    sequences = task.wrap(inner) if task.wrap else inner
    acceptor: Acceptor = GreedyAcceptor()
    verification: Verification = RowsTogether(TimedSequences(sequences, stats.seconds, clock=clock), logits=False)
    drafting = None
    if case.draft_branches:
        tree = Tree.over(sequences, case.draft_branches)
        acceptor = paths = PathAcceptor(acceptor)
        slots = TimedSlots(tree.paths.every, stats.seconds, clock)
        verification = TreeVerification(slots, tree.branching, paths, stats)
        sequences, drafting = tree.paths, tree.branching.begin
    cycles = None
    if isinstance(sequences, CycleSequences) and not task.host_loop:
        cycles = WholeCycles(TimedCycles(sequences, stats.seconds, clock), case.draft_tokens != 0)
    parts = Parts(
        prefill=TimedSequences(sequences, stats.seconds, ("prefill", "prefill"), clock),
        verification=verification,
        drafter=TimedDrafter(
            _drafter(model, task, case, TimedHead(sequences, heads, clock=clock), drafting), stats.seconds, clock
        ),
        policy=_policy(model, task, case, whole=cycles is not None),
        ending=Ending(task.new_tokens, (), TextStream(model.prompts.tokenizer, ())),
        stats=stats,
        prefill_chunk=model.engine.limits.prefill_chunk,
        cycles=cycles,
        acceptor=acceptor,
    )
    return _timed_answer(task.prompt, parts, heads, clock)


def _policy(model: Model, task: Task, case: Case, *, whole: bool) -> DraftPolicy:
    if case.draft_tokens != AUTO:
        return FixedPolicy(case.draft_tokens)
    # What the build measured of the head says nothing of forced drafts.
    measured = case.acceptance is None
    return model.auto.policy(head_of(model), len(task.prompt), whole=whole, measured=measured)


def head_of(model: Model) -> str:
    """The name of the drafter that is measured."""
    return head_kind(model.engine.spec) or "none"


class TimedHead(TimedSequences):
    """Sequences that time the calls of the head, without the drafter around them."""

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """Timed under draft."""
        with timed(self._seconds, "draft", self._clock):
            return super().draft(tokens, hidden, rows, draft_tokens, choose=choose)


def _drafter(
    model: Model, task: Task, case: Case, sequences: Sequences, drafting: Callable[[], Choose] | None
) -> Drafter:
    if not case.draft_tokens:
        return NoDrafter()
    head = own_head(model.engine, sequences, drafting)
    if case.acceptance is None:
        return head
    vocab_size = model.manifest.model.vocab_size
    return forced_head(head, len(task.prompt), task.continuation, vocab_size, case.acceptance, task.seed)


def _timed_answer(prompt: list[int], parts: Parts, heads: Seconds, clock: Clock) -> Answer:
    """Drive the loop; the time between two events is that of a cycle, what this function does is in none."""
    times: list[CycleTime] = []
    events = iter(Generation(prompt, parts))
    start = clock()
    next(events)
    prefill_s = clock() - start
    before = _marks(parts.stats, heads)
    while True:
        start = clock()
        event = next(events)
        wall = clock() - start
        after = _marks(parts.stats, heads)
        if isinstance(event, Finished):
            return Answer(event.token_ids, len(prompt), prefill_s, tuple(times), parts.stats)
        if event.token_ids:  # The last text may come without a token, after the last cycle.
            draft, verify, commit, head = (now - then for now, then in zip(after, before, strict=True))
            times.append(CycleTime(wall, draft, verify, commit, head + verify + commit, len(event.token_ids)))
        before = after


def _marks(stats: Stats, heads: Seconds) -> tuple[float, float, float, float]:
    """Draft, verify and commit so far, and the calls of the head."""
    return stats.seconds.draft, stats.seconds.verify, stats.seconds.commit, heads.draft
