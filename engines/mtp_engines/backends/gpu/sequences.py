"""Sequences of the GPU backends; see `mtp_engines.engine.PooledSequences` and `CycleSequences`."""

from __future__ import annotations

import numpy as np
import torch

from mtp_engines.backends.gpu.cycle import Cycler, Redraft
from mtp_engines.backends.gpu.device import Device, Setup
from mtp_engines.backends.gpu.ledger import Ledger
from mtp_engines.backends.gpu.window import DeviceWindow
from mtp_engines.checks import check_room, check_rows
from mtp_engines.engine import Cycle, Ids
from mtp_engines.errors import ContractError


class Slot:
    """What outlives a batch of sequences: its memory on the device and its captured graphs, for the next batch."""

    def __init__(self, setup: Setup, batch: int, cache_rows: int | None = None) -> None:
        self.device = Device.empty(setup, batch, cache_rows)
        self.cycler = Cycler(self.device)

    def clear(self) -> None:
        """Forget the sequences that were here."""
        self.device.reset()
        for sequence in range(self.device.batch):
            self.device.pages.release(sequence)
        self.cycler.redraft = None


class DeviceSequences(DeviceWindow):
    """The state of a batch of sequences on a device, which also run whole cycles, all together."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.device, Ledger(slot.device.batch), 0, slot.device.batch)
        self._cycler = slot.cycler

    @torch.inference_mode()
    def prefill(self, tokens: Ids, *, drafting: bool) -> Ids:
        """Consume prompts of one length and keep them."""
        with self._exclusive():
            self._refuse_unsound()
            if drafting and self.lengths.any():
                raise ContractError("prefill with drafting was called behind other rows; reset the sequences first.")
            self._ledger.staged, self._ledger.begun = None, False
            check_rows(tokens, self.lengths, self._spec, self._limits)
            count = tokens.shape[1]
            self._require_room(self.lengths + count)
            for start in range(0, count, self._limits.prefill_chunk):
                end = min(start + self._limits.prefill_chunk, count)
                hidden, tap = self._run_target(tokens[:, start:end], keep=True)
                self._broken[:] = True
                self._advance(np.full(len(tokens), end - start, np.int64))
                if drafting:
                    self._consume(tokens[:, start + 1 : end + 1], tap)
            ids, _ = self._choose(hidden[:, end - start - 1 : end - start], -1)
            self._cycler.begin(ids[:, 0], tap[:, end - start - 1] if drafting else None)
            self._ledger.begun, self._broken[:] = True, False
            first: Ids = ids[:, 0]
            return first

    @torch.inference_mode()
    def cycle(self, draft_tokens: int) -> Cycle:
        """Draft so many tokens behind the newest one, verify, commit what is right."""
        with self._exclusive():
            self._refuse_unsound()
            if not self._ledger.begun:
                raise ContractError("cycle was called before prefill; call prefill first.")
            most = self._limits.max_draft_tokens
            if not 0 <= draft_tokens <= most:
                raise ContractError(f"cycle got draft_tokens = {draft_tokens}, expected 0..{most}.")
            check_room(draft_tokens + 1, self.lengths, self._limits)
            self._require_room(self.lengths + draft_tokens + 1)
            widest = self._device.widths.widest
            self._device.pages.reserve(self.lengths + widest)
            if self._device.head_pages is not None:
                self._device.head_pages.reserve(self.lengths + 2 * widest)
            self._broken[:] = True
            result = self._cycler.run(draft_tokens)
            self.lengths += [len(tokens) for tokens in result.emitted]
            # The head is behind by the rows of this cycle, never further on.
            self._head_lengths[:] = self.lengths
            self._waiting[:], self._broken[:] = True, False
            return result

    @property
    def captured(self) -> int:
        """CUDA graphs that were captured so far."""
        return self._device.captures.count

    def redraft(self, redraft: Redraft | None) -> None:
        """Put other drafts in the place of the head's, for tools; before the first cycle after a reset."""
        self._cycler.redraft = redraft

    def _consume(self, tokens: Ids, tap: torch.Tensor) -> None:
        """Let the head follow the rows of a prompt whose next token is known."""
        device, rows = self._device, tokens.shape[1]
        if rows and device.head_pages is not None:
            width = device.widths.fit(rows)
            device.head_pages.reserve(self._head_lengths + width)
            run = device.head(width)
            run.tokens.zero_()
            run.tokens[:, :rows].copy_(torch.from_numpy(np.ascontiguousarray(tokens)))
            run.hidden[:, :rows].copy_(tap[:, :rows])
            run.enqueue(device.head_pages.lengths)
            device.head_pages.lengths += rows
            self._head_lengths += rows
