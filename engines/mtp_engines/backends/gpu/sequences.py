"""Sequences of the GPU backends; see `mtp_engines.engine.Sequences` and `CycleSequences`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mtp_engines.backends.gpu.capture import DEVICE_LOCK
from mtp_engines.backends.gpu.cycle import Cycler, Redraft
from mtp_engines.backends.gpu.device import Device, Setup, rows_at
from mtp_engines.backends.torch.tensors import array_of
from mtp_engines.checks import check_choose, check_draft, check_room, check_rows
from mtp_engines.engine import Choose, Cycle, Floats, Ids, Verified
from mtp_engines.errors import ContractError, EngineBusyError, NumericsError


class Slot:
    """What outlives a batch of sequences: its memory on the device and its captured graphs, for the next batch."""

    def __init__(self, setup: Setup, batch: int) -> None:
        self.device = Device(setup, batch)
        self.cycler = Cycler(self.device)

    def clear(self) -> None:
        """Forget the sequences that were here."""
        self.device.reset()
        self.cycler.redraft = None


class DeviceSequences:
    """The state of `batch` sequences on a device.

    A verify leaves its rows staged on the device; a commit only says how many of them the next verify shall
    make permanent. Rows of a prompt, more than the widest verify, are kept at once.
    """

    def __init__(self, setup: Setup, slot: Slot) -> None:
        self._device, self._cycler = slot.device, slot.cycler
        self._limits, self._spec = setup.limits, setup.spec
        batch = slot.device.batch
        self._lock = threading.Lock()
        self._staged: int | None = None
        self._kept_whole = False
        """The last rows are in the states already and not yet committed."""
        self._sound = True
        """No call failed half-way, with a part of its work done."""
        self._begun = False
        self.lengths: Ids = np.zeros(batch, np.int64)
        self._head_lengths: Ids = np.zeros(batch, np.int64)

    @torch.inference_mode()
    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Run the target over rows after the committed ones and stage the result."""
        with self._exclusive():
            self._refuse_unsound()
            self._staged, self._begun = None, False
            check_rows(tokens, self.lengths, self._spec, self._limits)
            rows = tokens.shape[1]
            if not 0 <= logit_rows <= rows:
                raise ContractError(f"verify got logit_rows = {logit_rows}, expected 0..{rows}.")
            self._kept_whole = rows > self._device.widths.widest
            hidden, tap = self._run_target(tokens, keep=self._kept_whole)
            ids, scored = self._choose(hidden[:, rows - logit_rows : rows], rows - logit_rows, logits=logits)
            self._staged = rows
            return Verified(ids, array_of(tap[:, :rows]), scored)

    @torch.inference_mode()
    def commit(self, rows: Ids) -> None:
        """Keep the first rows[b] staged rows of each sequence and drop the others."""
        with self._exclusive():
            staged = self._staged
            if staged is None:
                raise ContractError("commit was called with nothing staged; call verify first.")
            kept = np.asarray(rows)
            batch = len(self.lengths)
            if kept.dtype.kind not in "iu" or kept.shape != (batch,) or kept.min() < 0 or kept.max() > staged:
                raise ContractError(f"commit got rows {kept.tolist()}, expected {batch} counts of 0..{staged}.")
            if self._kept_whole and (kept != staged).any():
                raise ContractError(
                    f"Only {kept.tolist()} of {staged} rows were to be kept, but a run of more than "
                    f"{self._device.widths.widest} rows is kept whole on this backend."
                )
            delta = self._device.delta
            if not self._kept_whole:
                delta.newest ^= 1
                delta.accepted.copy_(torch.from_numpy(kept.astype(np.int32)))
            self._staged, self._kept_whole = None, False
            self._advance(kept.astype(np.int64))

    @torch.inference_mode()
    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """Let the head consume committed rows and propose tokens."""
        pages = self._device.head_pages
        if pages is None:
            raise ContractError("This bundle has no MTP head to draft with; build it without --no-mtp.")
        with self._exclusive():
            check_draft(tokens, hidden, rows, draft_tokens, len(self.lengths), self._spec, self._limits)
            if choose is not None:
                check_choose(self._spec)
            width = self._device.widths.fit(tokens.shape[1])
            pages.reserve(self._head_lengths + width + draft_tokens)
            run = self._device.head(width)
            run.tokens.zero_()
            run.tokens[:, : tokens.shape[1]].copy_(torch.from_numpy(tokens))
            run.hidden[:, : tokens.shape[1]].copy_(torch.from_numpy(np.ascontiguousarray(hidden)))
            counts = torch.from_numpy(rows.astype(np.int32)).to(pages.lengths.device)
            last = rows_at(run.enqueue(pages.lengths), counts - 1)
            pages.lengths += counts
            self._head_lengths += rows
            drafted = self._device.chain(last, pages.lengths, draft_tokens, choose)
            if not drafted:
                return np.zeros((len(rows), 0), np.int64)
            ids: Ids = torch.stack(drafted, 1).cpu().numpy()
            return ids

    @torch.inference_mode()
    def prefill(self, tokens: Ids, *, drafting: bool) -> Ids:
        """Consume prompts of one length and keep them."""
        with self._exclusive():
            self._refuse_unsound()
            if drafting and self.lengths.any():
                raise ContractError("prefill with drafting was called behind other rows; reset the sequences first.")
            self._staged, self._begun = None, False
            check_rows(tokens, self.lengths, self._spec, self._limits)
            self._sound = False
            count = tokens.shape[1]
            for start in range(0, count, self._limits.prefill_chunk):
                end = min(start + self._limits.prefill_chunk, count)
                hidden, tap = self._run_target(tokens[:, start:end], keep=True)
                self._advance(np.full(len(tokens), end - start, np.int64))
                if drafting:
                    self._consume(tokens[:, start + 1 : end + 1], tap)
            ids, _ = self._choose(hidden[:, end - start - 1 : end - start], -1)
            self._cycler.begin(ids[:, 0], tap[:, end - start - 1] if drafting else None)
            self._begun = self._sound = True
            first: Ids = ids[:, 0]
            return first

    @torch.inference_mode()
    def cycle(self, draft_tokens: int) -> Cycle:
        """Draft so many tokens behind the newest one, verify, commit what is right."""
        with self._exclusive():
            self._refuse_unsound()
            if not self._begun:
                raise ContractError("cycle was called before prefill; call prefill first.")
            most = self._limits.max_draft_tokens
            if not 0 <= draft_tokens <= most:
                raise ContractError(f"cycle got draft_tokens = {draft_tokens}, expected 0..{most}.")
            check_room(draft_tokens + 1, self.lengths, self._limits)
            widest = self._device.widths.widest
            self._device.pages.reserve(self.lengths + widest)
            if self._device.head_pages is not None:
                self._device.head_pages.reserve(self.lengths + 2 * widest)
            self._sound = False
            result = self._cycler.run(draft_tokens)
            self.lengths += [len(tokens) for tokens in result.emitted]
            # The head is behind by the rows of this cycle, never further on.
            self._head_lengths[:] = self.lengths
            self._sound = True
            return result

    @property
    def captured(self) -> int:
        """CUDA graphs that were captured so far."""
        return self._device.captures.count

    def redraft(self, redraft: Redraft | None) -> None:
        """Put other drafts in the place of the head's, for tools; before the first cycle after a reset."""
        self._cycler.redraft = redraft

    @torch.inference_mode()
    def logits(self, hidden: Floats) -> Floats:
        """float32[rows, vocab_size] for hidden rows."""
        return array_of(self._device.logits(torch.from_numpy(np.ascontiguousarray(hidden))))

    @torch.inference_mode()
    def snapshot(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the committed state of one sequence."""
        with self._exclusive():
            if self._staged is None:
                self._settle()
            caches = self._device.pages.snapshot(sequence, int(self.lengths[sequence]))
            return caches | self._device.delta.snapshot(sequence)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget everything."""
        with self._exclusive():
            self._staged, self._begun, self._kept_whole, self._sound = None, False, False, True
            self.lengths[:] = 0
            self._head_lengths[:] = 0
            self._device.reset()

    def _refuse_unsound(self) -> None:
        if not self._sound:
            raise ContractError("An earlier call on these sequences failed half-way; reset them.")
        if self._kept_whole:
            raise ContractError(
                f"A run of more than {self._device.widths.widest} rows is kept whole on this backend and was not "
                "committed; commit all of it, or reset."
            )

    def _settle(self) -> None:
        """Make the accepted rows permanent by a run of a row that nothing keeps, as the next verify would."""
        self._run_target(np.zeros((len(self.lengths), 1), np.int64), keep=False)

    def _run_target(self, tokens: Ids, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and taps of the rows, padded to a width that the graphs have."""
        device, rows = self._device, tokens.shape[1]
        width = device.widths.fit(rows)
        run = device.target(width)
        # Padding is written and read too.
        device.pages.reserve(self.lengths + width)
        run.tokens.zero_()
        run.tokens[:, :rows].copy_(torch.from_numpy(tokens))
        run.kept.fill_(rows if keep else 0)
        run.enqueue(device.delta.newest)
        device.delta.accepted.zero_()  # They are in the states now, whatever becomes of these rows.
        return run.hidden, run.tap

    def _choose(self, hidden: torch.Tensor, first_row: int, *, logits: bool = False) -> tuple[Ids, Floats | None]:
        """The target's choices, at one width whatever the number of rows, and what they were chosen from."""
        batch, rows, width = hidden.shape
        if not rows:
            empty = np.zeros((batch, 0, self._spec.vocab_size), np.float32)
            return np.zeros((batch, 0), np.int64), empty if logits else None
        ids, finite, scored = [], [], []
        for start in range(0, rows, self._device.widths.widest):
            part = hidden[:, start : start + self._device.widths.widest]
            wide = torch.zeros((batch, self._device.widths.fit(part.shape[1]), width), device=hidden.device)
            wide[:, : part.shape[1]] = part
            if logits:
                chosen, numbers, scores = self._device.score(wide)
                scored.append(scores[:, : part.shape[1]].float().cpu().numpy().copy())
            else:
                chosen, numbers = self._device.choose(wide)
            ids.append(chosen[:, : part.shape[1]].cpu().numpy().copy())
            finite.append(numbers[:, : part.shape[1]].cpu().numpy())
        self._refuse_non_numbers(np.concatenate(finite, 1), first_row)
        return np.concatenate(ids, 1), np.concatenate(scored, 1) if logits else None

    def _refuse_non_numbers(self, finite: npt.NDArray[np.bool_], first_row: int) -> None:
        if not finite.all():
            sequence, row = np.argwhere(~finite)[0]
            raise NumericsError(
                f"The target produced a value that is not a number at position "
                f"{self.lengths[sequence] + first_row + row} of sequence {sequence}. Check the checkpoint's weights "
                "for NaN or infinity and build it again."
            )

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

    def _advance(self, rows: Ids) -> None:
        self.lengths += rows
        self._device.pages.lengths += torch.from_numpy(rows.astype(np.int32)).to(self._device.pages.lengths.device)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise EngineBusyError("These sequences are in use by another thread; open sequences for each thread.")
        try:
            with DEVICE_LOCK:
                yield
        finally:
            self._lock.release()
