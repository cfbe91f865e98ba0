"""Neighbouring sequences on a device; see `mtp_engines.engine.PooledSequences`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mtp_engines.backends.gpu.capture import DEVICE_LOCK
from mtp_engines.backends.gpu.device import Device, rows_at
from mtp_engines.backends.gpu.ledger import Ledger
from mtp_engines.backends.torch.tensors import array_of, bits_of, tensor_of_array
from mtp_engines.checks import check_choose, check_draft, check_rows
from mtp_engines.contracts import names
from mtp_engines.engine import Choose, Floats, Ids, Saved, Verified
from mtp_engines.errors import ContractError, EngineBusyError, NumericsError


class DeviceWindow:
    """Some neighbouring sequences of a batch, or all.

    A verify leaves its rows staged on the device; a commit only says how many of them the next verify shall
    make permanent. Rows of a prompt, more than the widest verify, are kept at once.
    """

    def __init__(
        self, whole: Device, ledger: Ledger, start: int, count: int, owner: DeviceWindow | None = None
    ) -> None:
        """`count` sequences from `start` on of those of `whole`, whose memory others may have when `owner` is gone."""
        self._whole, self._ledger, self._start, self._owner = whole, ledger, start, owner
        with DEVICE_LOCK:
            self._device = device = whole.window(start, count)
        self._limits, self._spec, self._key = device.limits, device.spec, (start, count)
        mine = slice(start, start + count)
        self.lengths: Ids = ledger.lengths[mine]
        self._head_lengths: Ids = ledger.head_lengths[mine]
        self._waiting, self._unkept, self._broken = ledger.waiting[mine], ledger.unkept[mine], ledger.broken[mine]
        self.pool_rows = device.pages.most_rows

    @torch.inference_mode()
    def verify(self, tokens: Ids, logit_rows: int, *, logits: bool = False) -> Verified:
        """Run the target over rows after the committed ones and stage the result."""
        with self._exclusive():
            self._refuse_unsound()
            self._ledger.staged, self._ledger.begun = None, False
            check_rows(tokens, self.lengths, self._spec, self._limits)
            rows = tokens.shape[1]
            if not 0 <= logit_rows <= rows:
                raise ContractError(f"verify got logit_rows = {logit_rows}, expected 0..{rows}.")
            keep = rows > self._device.widths.widest
            if keep:
                self._require_room(self.lengths + rows)
            hidden, tap = self._run_target(tokens, keep=keep)
            self._unkept[:] = keep
            ids, scored = self._choose(hidden[:, rows - logit_rows : rows], rows - logit_rows, logits=logits)
            self._ledger.staged = (*self._key, rows)
            return Verified(ids, array_of(tap[:, :rows]), scored)

    @torch.inference_mode()
    def commit(self, rows: Ids) -> None:
        """Keep the first rows[b] staged rows of each sequence and drop the others."""
        with self._exclusive():
            staged = self._ledger.staged
            if staged is None or staged[:2] != self._key:
                raise ContractError("commit was called with nothing staged; call verify first.")
            kept, batch, most = np.asarray(rows), len(self.lengths), staged[2]
            if kept.dtype.kind not in "iu" or kept.shape != (batch,) or kept.min() < 0 or kept.max() > most:
                raise ContractError(f"commit got rows {kept.tolist()}, expected {batch} counts of 0..{most}.")
            kept = kept.astype(np.int64)
            if self._unkept.any():
                if (kept != most).any():
                    raise ContractError(
                        f"Only {kept.tolist()} of {most} rows were to be kept, but a run of more than "
                        f"{self._device.widths.widest} rows is kept whole on this backend."
                    )
            else:
                self._require_room(np.where(kept, self.lengths + kept, 0))
                self._device.delta.swap()
                self._device.delta.accepted.copy_(torch.from_numpy(kept.astype(np.int32)))
                self._waiting[:] = kept > 0
            self._ledger.staged, self._unkept[:] = None, False
            self._advance(kept)

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
    def logits(self, hidden: Floats) -> Floats:
        """float32[rows, vocab_size] for hidden rows."""
        return array_of(self._device.logits(torch.from_numpy(np.ascontiguousarray(hidden))))

    def window(self, start: int, count: int) -> DeviceWindow:
        """Neighbouring sequences with the same memory."""
        if not 0 <= start < start + count <= len(self.lengths):
            raise ContractError(f"window got {count} sequences from {start} on, there are {len(self.lengths)}.")
        if count == len(self.lengths):
            return self
        return DeviceWindow(self._whole, self._ledger, self._start + start, count, self)

    @torch.inference_mode()
    def snapshot(self, sequence: int) -> dict[str, npt.NDArray[Any]]:
        """Copies of the committed state of one sequence, float32."""
        with self._exclusive():
            return {name: array_of(tensor) for name, tensor in self._state(sequence, 0).items()}

    @torch.inference_mode()
    def save(self, sequence: int, since: int = 0) -> Saved:
        """A copy of the target's committed state of one sequence, as the device has it."""
        with self._exclusive():
            length = int(self.lengths[sequence])
            if not 0 <= since <= length:
                raise ContractError(f"save got rows from {since} on, but {length} are committed.")
            arrays = {name: bits_of(tensor) for name, tensor in self._state(sequence, since).items()}
            return Saved(since, length, arrays)

    @torch.inference_mode()
    def restore(self, sequence: int, parts: Iterable[Saved]) -> None:
        """Put saved parts in the place of one sequence's state."""
        with self._exclusive():
            self.window(sequence, 1)._clear()
            length, newest = 0, None
            for part in parts:
                if part.since != length:
                    raise ContractError(f"restore got a part from row {part.since} on, expected row {length}.")
                length, newest = part.length, part
                rows = {name: array for name, array in part.arrays.items() if names.is_cache(name)}
                self._put(sequence, part.since, length, _tensors(rows))
            if newest is not None:
                self._put_states(sequence, _tensors(newest.arrays))

    @torch.inference_mode()
    def copy(self, source: int, target: int, since: int = 0) -> None:
        """Make one sequence the same as another, but for the heads."""
        with self._exclusive():
            state = self._state(source, since)
            self._ledger.staged, self._ledger.begun = None, False
            self._device.delta.accepted[target] = 0
            self._waiting[target] = self._unkept[target] = self._broken[target] = False
            self._put(target, since, int(self.lengths[source]), state)
            self._put_states(target, state)

    @torch.inference_mode()
    def hold(self, sequence: int, rows: int) -> bool:
        """Have room for the first `rows` rows of a sequence until it is released, if there is room."""
        with self._exclusive():
            return self._device.pages.hold(sequence, rows)

    @torch.inference_mode()
    def release(self, sequence: int) -> None:
        """Reset one sequence and give back its room."""
        self.window(sequence, 1).reset()
        with self._exclusive():
            self._device.pages.release(sequence)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget everything."""
        with self._exclusive():
            self._clear()

    def _clear(self) -> None:
        self._ledger.staged, self._ledger.begun = None, False
        for flags in (self._waiting, self._unkept, self._broken):
            flags[:] = False
        self.lengths[:] = 0
        self._head_lengths[:] = 0
        self._device.reset()

    def _state(self, sequence: int, since: int) -> dict[str, torch.Tensor]:
        """Rows from `since` on and the states of one sequence, with all that is committed."""
        if self._waiting[sequence]:
            # By a run of a row that nothing keeps, as the next verify would.
            one = self.window(sequence, 1)
            one._refuse_unsound()
            one._run_target(np.zeros((1, 1), np.int64), keep=False)
        device, length = self._device, int(self.lengths[sequence])
        return device.pages.rows(sequence, since, length) | device.delta.of(sequence)

    def _put(self, sequence: int, start: int, length: int, state: dict[str, torch.Tensor]) -> None:
        """Rows from `start` to `length` in the place of those of one sequence."""
        rows = np.where(np.arange(len(self.lengths)) == sequence, length, 0)
        self._require_room(rows)
        device = self._device
        device.pages.reserve(rows)
        device.pages.put(sequence, start, state)
        self.lengths[sequence] = length
        device.pages.lengths[sequence] = length

    def _put_states(self, sequence: int, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self._device.delta.of(sequence).items():
            tensor.copy_(state[name])

    def _require_room(self, rows: Ids) -> None:
        """For rows[b] first rows of each sequence; those that have none would be lost.

        Raises:
            ContractError: they were not held.
        """
        for sequence, count in enumerate(rows.tolist()):
            if count > (room := self._device.pages.room(sequence)):
                raise ContractError(
                    f"Sequence {self._start + sequence} is to keep {count} rows, and holds {room}; hold them first."
                )

    def _refuse_unsound(self) -> None:
        if self._broken.any():
            raise ContractError("An earlier call on these sequences failed half-way; reset them.")
        if self._unkept.any():
            raise ContractError(
                f"A run of more than {self._device.widths.widest} rows is kept whole on this backend and was not "
                "committed; commit all of it, or reset."
            )

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
        newest = device.delta.agreed()
        self._broken[:] = True
        if keep:
            run.enqueue(newest)
        else:
            device.captures.run(("verify", self._key, width, newest), lambda: run.enqueue(newest))
        device.delta.accepted.zero_()  # They are in the states now, whatever becomes of these rows.
        self._waiting[:] = self._broken[:] = False
        return run.hidden, run.tap

    def _choose(self, hidden: torch.Tensor, first_row: int, *, logits: bool = False) -> tuple[Ids, Floats | None]:
        """The target's choices, and what they were chosen from.

        Raises:
            NumericsError: a row was no number; the first one is `first_row` rows behind the committed ones.
        """
        ids, finite, scored = self._device.choices(hidden, logits=logits)
        if not finite.all():
            sequence, row = np.argwhere(~finite)[0]
            raise NumericsError(
                f"The target produced a value that is not a number at position "
                f"{self.lengths[sequence] + first_row + row} of sequence {sequence}. Check the checkpoint's weights "
                "for NaN or infinity and build it again."
            )
        return ids, scored

    def _advance(self, rows: Ids) -> None:
        self.lengths += rows
        self._device.pages.lengths += torch.from_numpy(rows.astype(np.int32)).to(self._device.pages.lengths.device)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._ledger.lock.acquire(blocking=False):
            raise EngineBusyError("These sequences are in use by another thread; open sequences for each thread.")
        try:
            with DEVICE_LOCK:
                yield
        finally:
            self._ledger.lock.release()


def _tensors(arrays: dict[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
    return {name: tensor_of_array(array) for name, array in arrays.items()}
