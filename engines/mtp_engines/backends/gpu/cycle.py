"""The whole cycle on a device: draft, verify, accept, commit and gather, with one read by the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from mtp_engines.backends.gpu.accepting import Acceptor
from mtp_engines.backends.gpu.device import Device, rows_at
from mtp_engines.engine import Cycle, Ids
from mtp_engines.errors import ContractError, NumericsError

Tensor = torch.Tensor
Redraft = Callable[[Tensor, list[Tensor]], list[Tensor]]
"""int32[batch] committed rows and the drafts, int64[batch] each -> the drafts that are verified."""


class Cycler:
    """Cycles of one batch behind its prompts.

    Between two cycles the device holds, for each sequence: the newest token, which the target has not consumed;
    the emitted tokens and hidden rows of the last cycle, which the head has not; and how many of them count.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        where, batch, width = device.executor.device, device.batch, device.widths.widest
        self._drafting = False
        self._pending = torch.zeros(batch, dtype=torch.int64, device=where)
        self._emitted = torch.zeros((batch, width), dtype=torch.int64, device=where)
        self._observed = torch.zeros(batch, dtype=torch.int32, device=where)
        self._active = torch.ones(batch, dtype=torch.bool, device=where)
        """Sequences that emit in this cycle."""
        self._tap = torch.zeros((batch, width, device.spec.tap_width), device=where)
        self._acceptors: dict[int, Acceptor] = {}
        self._results: dict[int, Tensor] = {}
        self.redraft: Redraft | None = None

    def begin(self, pending: Ids, tap: Tensor | None) -> None:
        """Begin behind a prompt.

        Args:
            pending: int64[batch], the first tokens.
            tap: float32[batch, tap_width], the target's rows of the prompts' last tokens; None without a head.
        """
        self._drafting = tap is not None
        self._pending.copy_(torch.from_numpy(pending))
        self._emitted[:, 0] = self._pending
        self._observed.fill_(1)
        self._active.fill_(True)  # A cycle before may have ended in its retry.
        if tap is not None:
            self._tap[:, 0] = tap

    def run(self, draft_tokens: int) -> Cycle:
        """One cycle; again without a draft for sequences whose draft led the target out of the numbers."""
        if draft_tokens and not self._drafting:
            raise ContractError("cycle was asked for drafts, but prefill was called without drafting.")
        draft, emitted = self._once(draft_tokens)
        if all(emitted):
            return Cycle(draft, emitted)
        # Plain decoding never sees that draft. The other sequences run along and emit nothing.
        self._active.copy_(torch.tensor([not tokens for tokens in emitted]))
        _, again = self._once(0)
        self._active.fill_(True)
        if not all(first or second for first, second in zip(emitted, again, strict=True)):
            raise NumericsError(
                "The target produced a value that is not a number. Check the checkpoint's weights for NaN or infinity "
                "and build it again."
            )
        return Cycle(draft, [first + second for first, second in zip(emitted, again, strict=True)])

    def _once(self, draft_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
        newest = self._device.delta.agreed()
        key = (self._drafting, self.redraft, draft_tokens, newest)
        self._device.captures.run(key, lambda: self._enqueue(draft_tokens, newest))
        self._device.delta.swap()
        # The one read of a cycle.
        result: npt.NDArray[np.int64] = self._results[draft_tokens].cpu().numpy()
        counts, draft, emitted = result[:, 0], result[:, 1 : 1 + draft_tokens], result[:, 1 + draft_tokens :]
        return draft.tolist(), [row[:count].tolist() for row, count in zip(emitted, counts, strict=True)]

    def _enqueue(self, draft_tokens: int, newest: int) -> None:
        device = self._device
        drafted = self._draft(draft_tokens) if self._drafting else []
        if self.redraft is not None:
            drafted = self.redraft(device.pages.lengths, drafted)
        draft = torch.stack(drafted, 1) if drafted else self._emitted.new_zeros((device.batch, 0))
        run = device.target(device.widths.fit(draft_tokens + 1))
        run.tokens.zero_()
        run.tokens[:, 0] = self._pending
        run.tokens[:, 1 : draft_tokens + 1] = draft
        run.kept.zero_()
        run.enqueue(newest)
        chosen, finite = device.choose(run.hidden)
        chosen, finite = chosen[:, : draft_tokens + 1].contiguous(), finite[:, : draft_tokens + 1].all(1)
        self._keep(draft_tokens, draft, chosen, finite & self._active, run.tap)

    def _draft(self, draft_tokens: int) -> list[Tensor]:
        """Let the head consume the rows of the last cycle, then chain."""
        device = self._device
        pages = device.head_pages
        assert pages is not None
        run = device.head(device.widths.widest)
        run.tokens.copy_(self._emitted)
        run.hidden.copy_(self._tap)
        last = rows_at(run.enqueue(pages.lengths), self._observed - 1)
        pages.lengths += self._observed
        return device.chain(last, pages.lengths, draft_tokens)

    def _keep(self, draft_tokens: int, draft: Tensor, chosen: Tensor, emitting: Tensor, tap: Tensor) -> None:
        """Accept for the sequences that emit, and leave everything as the next cycle wants it."""
        device = self._device
        if draft_tokens not in self._acceptors:
            self._acceptors[draft_tokens] = Acceptor(device.executor.device, device.batch, draft_tokens)
            shape = (device.batch, 2 * draft_tokens + 2)
            self._results[draft_tokens] = torch.zeros(shape, dtype=torch.int64, device=device.executor.device)
        accepted = self._acceptors[draft_tokens].enqueue(draft, chosen)
        rows = torch.where(emitting, accepted.accepted_rows, 0)
        device.delta.accepted.copy_(rows)
        device.pages.lengths += rows
        self._observed.copy_(rows)
        self._pending.copy_(torch.where(emitting, accepted.next_token, self._pending))
        self._emitted[:, : draft_tokens + 1] = accepted.emitted
        self._tap[:, : tap.shape[1]] = tap[:, : self._tap.shape[1]]
        result = self._results[draft_tokens]
        result[:, 0] = rows
        result[:, 1 : 1 + draft_tokens] = draft
        result[:, 1 + draft_tokens :] = accepted.emitted
