"""Deliberate faults in the shared runner, each of which the comparison of `test_runner` has to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mtp_engines.backends.gpu import caches
from mtp_engines.backends.gpu.accepting import Accepted, Acceptor
from mtp_engines.backends.gpu.caches import CachePages
from mtp_engines.backends.gpu.cycle import Cycler
from mtp_engines.backends.gpu.runs import TargetRun
from mtp_engines.backends.gpu.sequences import DeviceSequences
from mtp_engines.backends.gpu.state import DeltaStates
from tests.gpu.parts import Opened, Said, by_cycles, by_host, plain, small_pages, state_error

PROMPT = [5, 6, 20]
TOKENS, DRAFTS = 16, 3
STATES = 5e-5


@pytest.fixture(scope="module")
def reference(partial: Opened) -> Said:
    """What speculation on ONNX Runtime says, with the states of plain decoding."""
    said = by_host(partial.engine, PROMPT, TOKENS, DRAFTS)
    said.states = plain(partial.engine, PROMPT, TOKENS + DRAFTS + 1, states=True).states
    return said


@dataclass(frozen=True)
class Seen:
    """What a comparison with the reference says."""

    tokens: bool
    drafts: bool
    states: bool


def compare(opened: Opened, reference: Said, *, tokens: int = TOKENS) -> Seen:
    """Which of tokens, drafts and states are right in whole cycles."""
    ours = by_cycles(opened.torch(), PROMPT, tokens, DRAFTS, states=True)
    known = {length: value for length, value in ours.states.items() if length in reference.states}
    right = bool(known) and state_error(known, reference.states) < STATES and len(known) == len(ours.states)
    return Seen(ours.cut(tokens) == reference.ids[:tokens], ours.drafts == reference.drafts[: len(ours.drafts)], right)


def test_without_a_fault_everything_is_right(partial: Opened, reference: Said) -> None:
    assert compare(partial, reference) == Seen(True, True, True)


def _accepts(more: int) -> Callable[[Any], Any]:
    def fault(patch: pytest.MonkeyPatch) -> None:
        right = Acceptor.enqueue

        def wrong(self: Acceptor, draft: torch.Tensor, chosen: torch.Tensor) -> Accepted:
            accepted = right(self, draft, chosen)
            return accepted._replace(accepted_rows=(accepted.accepted_rows + more).clamp(1, draft.shape[1] + 1))

        patch.setattr(Acceptor, "enqueue", wrong)

    return fault


def _one_set(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeltaStates, "swap", lambda self: None)


def _prompt_not_kept(patch: pytest.MonkeyPatch) -> None:
    right = DeviceSequences._run_target
    patch.setattr(DeviceSequences, "_run_target", lambda self, tokens, *, keep: right(self, tokens, keep=False))


def _padding_kept(patch: pytest.MonkeyPatch) -> None:
    """The prompt's padding goes into the states too."""
    right = TargetRun.enqueue

    def wrong(self: TargetRun, newest: int) -> None:
        if int(self.kept[0]):
            self.kept.fill_(self._width)
        right(self, newest)

    patch.setattr(TargetRun, "enqueue", wrong)


def _first_pages_only(patch: pytest.MonkeyPatch) -> None:
    """The table on the device is that of the first reservation for ever."""
    small_pages(patch)
    right = CachePages.reserve

    def wrong(self: CachePages, rows: np.ndarray) -> None:
        table = self.table.tensor
        first = table.clone() if (table >= 0).any() else None
        right(self, rows)
        if first is not None:
            table.copy_(torch.where(first >= 0, first, 0))

    patch.setattr(CachePages, "reserve", wrong)


def _late_positions(patch: pytest.MonkeyPatch) -> None:
    """Rows behind the prompt are one position late."""
    right = caches._positions

    def wrong(lengths: torch.Tensor, rows: int, last: int) -> torch.Tensor:
        return right(lengths + (lengths > 0).to(lengths.dtype), rows, last)

    patch.setattr(caches, "_positions", wrong)


def _all_positions_late(patch: pytest.MonkeyPatch) -> None:
    """Attention knows only differences of positions, so nothing but the cached keys can say this."""
    right = caches._positions
    patch.setattr(caches, "_positions", lambda lengths, rows, last: right(lengths + 1, rows, last))


def _stale_lengths(patch: pytest.MonkeyPatch) -> None:
    """The rows of a cycle are one short in the caches."""
    right = Cycler._keep

    def wrong(self: Cycler, *given: Any) -> None:
        right(self, *given)
        self._device.pages.lengths -= 1

    patch.setattr(Cycler, "_keep", wrong)


WRONG_TOKENS = {
    "one draft too many is accepted": _accepts(1),
    "one draft too few is accepted, and emitted": _accepts(-1),
    "the sets of staged rows do not change places": _one_set,
    "the rows of a prompt are not kept": _prompt_not_kept,
    "the padding of a prompt is kept": _padding_kept,
}


@pytest.mark.parametrize("fault", WRONG_TOKENS)
def test_control_a_fault_changes_tokens_or_states(
    partial: Opened, reference: Said, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    WRONG_TOKENS[fault](monkeypatch)
    seen = compare(partial, reference)
    assert not seen.tokens, f"these tests cannot see that {fault}"
    assert not seen.states


# A token of this chain depends so much on the one before it that wrong rows of attention change none in a short text.
WRONG_STATES = {
    "the table of pages is not brought up to date": _first_pages_only,
    "rows behind the prompt are one position late": _late_positions,
    "the caches are one row short after a cycle": _stale_lengths,
    "all positions are one late": _all_positions_late,
}


@pytest.mark.parametrize("fault", WRONG_STATES)
def test_control_a_fault_of_attention_changes_states(
    partial: Opened, reference: Said, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    WRONG_STATES[fault](monkeypatch)
    assert not compare(partial, reference).states, f"these tests cannot see that {fault}"


def _one_row_too_few(patch: pytest.MonkeyPatch) -> None:
    right = Cycler._draft

    def wrong(self: Cycler, draft_tokens: int) -> list[torch.Tensor]:
        drafted = right(self, draft_tokens)
        assert self._device.head_pages is not None
        self._device.head_pages.lengths -= 1
        return drafted

    patch.setattr(Cycler, "_draft", wrong)


def _other_row(patch: pytest.MonkeyPatch) -> None:
    """The head is fed the hidden row before the right one."""
    right = Cycler._keep

    def wrong(self: Cycler, *given: Any) -> None:
        right(self, *given)
        self._tap.copy_(self._tap.roll(1, 1))

    patch.setattr(Cycler, "_keep", wrong)


def _prompt_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceSequences, "_consume", lambda self, tokens, tap: None)


WRONG_DRAFTS = {
    "the head consumes one row too few": _one_row_too_few,
    "the head is fed the hidden row before": _other_row,
    "the head has not seen the prompt": _prompt_not_seen,
}


@pytest.mark.parametrize("fault", WRONG_DRAFTS)
def test_control_a_fault_of_the_head_changes_drafts_and_no_token(
    partial: Opened, reference: Said, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    WRONG_DRAFTS[fault](monkeypatch)
    seen = compare(partial, reference)
    assert (seen.tokens, seen.states) == (True, True), "a wrong draft costs time, never a token"
    assert not seen.drafts, f"these tests cannot see that {fault}"


def test_control_a_commit_that_keeps_rejected_rows_is_seen(
    partial: Opened, reference: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of the way with the host in between."""
    right = DeviceSequences.commit

    def wrong(self: DeviceSequences, rows: np.ndarray) -> None:
        _, _, staged = self._ledger.staged or (0, 0, 0)
        right(self, rows)
        if 1 < staged <= self._device.widths.widest:
            self._device.delta.accepted.fill_(staged)

    monkeypatch.setattr(DeviceSequences, "commit", wrong)
    ours = by_host(partial.torch(), PROMPT, TOKENS, DRAFTS)
    assert ours.cut(TOKENS) != reference.ids[:TOKENS]
