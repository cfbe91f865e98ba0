"""Rounds: every generation runs until it asks something of its slot; calls of one kind are answered together.

A generation is ordinary code, `mtp_runtime.loop.Generation`, in a greenlet of its own. So one answer and many take the
same path, and what is batched here is what one of them would do alone, bit for bit on an exact bundle, whose rows do
not depend on the number or place of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_engines.contracts.manifest import Limits
from mtp_engines.engine import Ids, SlotSequences, Verified
from mtp_runtime.batching.calls import Call, Commit, Draft, Turn, Verify
from mtp_runtime.batching.choosing import Chosen
from mtp_runtime.batching.tasks import Stopped, Task


@dataclass(frozen=True)
class Round:
    """What happened in a round.

    Attributes:
        answers: how many verified rows.
        seconds: wall time from the first draft to the last commit, without chunks of prompts.
        fed: rows that draft heads caught up with.
    """

    answers: int
    seconds: float
    fed: int


class Rounds:
    """Answers the calls of tasks over the slots of one engine. Not for two threads at once.

    Attributes:
        tasks: those that have not ended.
        widths: rows of the newest verify, of each slot that took part.
        newest: the newest round.
    """

    def __init__(
        self,
        slots: SlotSequences,
        limits: Limits,
        prefill_budget: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`prefill_budget` is the most rows of prompts a round, but for one chunk, which always may run."""
        self._slots, self._budget, self._clock = slots, prefill_budget, clock
        self._narrow = limits.max_draft_tokens + 1
        self.tasks: list[Task] = []
        self.widths: list[int] = []
        self.newest, self._fed = Round(0, 0.0, 0), 0

    def start(self, slot: int, work: Callable[[], None]) -> Task:
        """Add a task; it begins with the next round."""
        task = Task(slot, work)
        self.tasks.append(task)
        return task

    def stop(self, task: Task) -> None:
        """End a task where it waits; its slot is free at once."""
        if not task.ended:
            task.fail(Stopped())
        self._sweep()

    def run(self) -> list[Task]:
        """One round: chunks of prompts, drafts, one verify of all, commits.

        Returns:
            The tasks that ended in it.
        """
        before = list(self.tasks)
        for task in self._waiting(Turn):
            task.answer(None)
        self._prompts()
        self._fed, start = 0, self._clock()
        fed: set[Task] = set()
        while drafting := [task for task in self._waiting(Draft) if task not in fed]:
            # A long text that was read before feeds the head chunk by chunk, one a round, as a prompt is read.
            fed |= {task for task in drafting if isinstance(task.call, Draft) and task.call.rows > self._narrow}
            self._draft(drafting)
        self._verify([task for task in self._waiting(Verify) if not self._is_prompt(task)])
        self.newest = Round(len(self.widths), self._clock() - start, self._fed)
        self._sweep()
        return [task for task in before if task.ended]

    def _waiting(self, kind: type[Call]) -> list[Task]:
        return [task for task in self.tasks if isinstance(task.call, kind)]

    def _is_prompt(self, task: Task) -> bool:
        return isinstance(task.call, Verify) and task.call.rows > self._narrow

    def _sweep(self) -> None:
        self.tasks = [task for task in self.tasks if not task.ended]

    def _prompts(self) -> None:
        """Chunks of prompts, each in a run of its own: in the order in which the tasks came, one at least."""
        left = self._budget
        for task in list(self.tasks):
            while self._is_prompt(task):
                assert isinstance(task.call, Verify)
                if left < task.call.rows and left < self._budget:
                    return
                left -= task.call.rows
                self._alone(task)

    def _verify(self, tasks: Sequence[Task]) -> None:
        """One run for all; each alone if that fails, no numbers say, so that only the guilty one does."""
        calls = [task.call for task in tasks if isinstance(task.call, Verify)]
        self.widths = [call.rows for call in calls]
        if len(tasks) == 1:
            self._alone(tasks[0])
        if len(tasks) < 2:
            return
        first, count = _span(tasks)
        rows = max(call.rows for call in calls)
        tokens = np.zeros((count, rows), np.int64)
        for task, call in zip(tasks, calls, strict=True):
            tokens[task.slot - first, : call.rows] = call.tokens[0]
        window = self._window_of(first, count)
        scored = rows if any(call.logit_rows for call in calls) else 0
        logits = any(call.logits for call in calls)
        try:
            # Sequences that only fill a gap are run from where they stand and keep nothing.
            verified = window.verify(tokens, scored, logits=True) if logits else window.verify(tokens, scored)
        except Exception:
            for task in tasks:
                self._alone(task)
            return
        kept, retry = np.zeros(count, np.int64), []
        for task, call in zip(tasks, calls, strict=True):
            task.answer(_row_of(verified, task.slot - first, call))
            if isinstance(task.call, Commit):
                kept[task.slot - first] = task.call.rows
            elif not task.ended:
                retry.append(task)
        _commit(window, kept, [task for task in tasks if isinstance(task.call, Commit)])
        for task in retry:
            self._alone(task)

    def _alone(self, task: Task) -> None:
        """Verify calls of one task in a window of its own, until what it keeps is committed."""
        slot = self._slot(task)
        while isinstance(call := task.call, Verify):
            try:
                verified = slot.verify(call.tokens, call.logit_rows, logits=call.logits)
            except Exception as error:
                task.fail(error)
                continue
            task.answer(verified)
            if isinstance(task.call, Commit):
                _commit(slot, np.array([task.call.rows]), [task])
                return

    def _draft(self, tasks: Sequence[Task]) -> None:
        """One chain for all that draft; prompts and rows without a draft are consumed apart."""
        together: list[Task] = []
        for task in tasks:
            call = task.call
            assert isinstance(call, Draft)
            self._fed += call.rows
            if not call.draft_tokens:
                self._consume(task, call, call.rows)
                continue
            if len(tasks) > 1 and call.rows > self._narrow:
                # All but the last row, so that a prompt does not make the batch wide.
                self._consume(task, call, call.rows - 1)
            if isinstance(task.call, Draft):
                together.append(task)
        if together:
            self._draft_together(together)

    def _consume(self, task: Task, call: Draft, rows: int) -> None:
        """Let the head consume the first rows of a call; what is left of it waits."""
        tokens, hidden = call.tokens[:, :rows], call.hidden[:, :rows]
        try:
            drafted = self._slot(task).draft(tokens, hidden, np.array([rows]), 0)
        except Exception as error:  # A drafter's failure, which its task knows to live with.
            task.fail(error)
            return
        if rows == call.rows:
            task.answer(drafted)
        else:
            task.call = Draft(call.tokens[:, rows:], call.hidden[:, rows:], call.draft_tokens, call.choose)

    def _draft_together(self, tasks: Sequence[Task]) -> None:
        calls = [task.call for task in tasks if isinstance(task.call, Draft)]
        first, count = _span(tasks)
        width = max(call.rows for call in calls)
        tokens = np.zeros((count, width), np.int64)
        hidden = np.zeros((count, width, calls[0].hidden.shape[-1]), np.float32)
        rows: Ids = np.zeros(count, np.int64)
        places = [task.slot - first for task in tasks]
        for place, call in zip(places, calls, strict=True):
            tokens[place, : call.rows], hidden[place, : call.rows] = call.tokens[0], call.hidden[0]
            rows[place] = call.rows
        window, most = self._window_of(first, count), max(call.draft_tokens for call in calls)
        chosen = Chosen(dict(zip(places, calls, strict=True)))
        try:
            if all(call.choose is None for call in calls):
                drafted = window.draft(tokens, hidden, rows, most)
            else:
                drafted = window.draft(tokens, hidden, rows, most, choose=chosen)
        except Exception as error:  # As above.
            for task in tasks:
                task.fail(error)
            return
        for task, place, call in zip(tasks, places, calls, strict=True):
            end = chosen.ends.get(place, most)
            if isinstance(end, Exception):
                task.fail(end)
            else:
                task.answer(drafted[place : place + 1, : min(end, call.draft_tokens)])

    def _slot(self, task: Task) -> SlotSequences:
        return self._window_of(task.slot, 1)

    def _window_of(self, first: int, count: int) -> SlotSequences:
        return self._slots.window(first, count)


def _span(tasks: Sequence[Task]) -> tuple[int, int]:
    """The first slot, and how many there are up to the last."""
    slots = [task.slot for task in tasks]
    return min(slots), max(slots) - min(slots) + 1


def _commit(window: SlotSequences, kept: Ids, tasks: Sequence[Task]) -> None:
    """Commit, and let those that wait for it go on; if it fails, nobody can tell what they hold, so they end."""
    try:
        window.commit(kept)
    except BaseException as error:
        for task in tasks:
            task.fail(error)
        return
    for task in tasks:
        task.answer(None)


def _row_of(verified: Verified, place: int, call: Verify) -> Verified:
    """The part of one sequence, whose rows are followed by padding."""
    end, start = call.rows, call.rows - call.logit_rows
    ids = verified.ids[place : place + 1, start:end] if call.logit_rows else verified.ids[place : place + 1, :0]
    scored = verified.logits
    logits = None if scored is None or not call.logits else scored[place : place + 1, start:end]
    # The next run writes over the hidden rows.
    return Verified(ids, verified.hidden[place : place + 1, :end].copy(), logits)
