"""Runs of the graphs at fixed widths: static buffers, bound once, enqueued often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mtp_engines.backends.gpu.caches import Caches
from mtp_engines.backends.gpu.executor import Enqueue, Executor
from mtp_engines.backends.gpu.state import DeltaStates
from mtp_engines.contracts import names
from mtp_engines.contracts.model import ModelSpec, MtpSpec

Tensor = torch.Tensor


class Buffers:
    """Memory of runs. Those of the same sizes share it, since one at a time is enqueued and read."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._tensors: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """The buffer of a name and shape, of zeros when it is new."""
        key = (name, tuple(shape))
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(key[1], dtype=dtype, device=self.executor.device)
        return self._tensors[key]


class TargetRun:
    """The backbone over `width` rows of every sequence."""

    def __init__(self, buffers: Buffers, spec: ModelSpec, pages: Caches, delta: DeltaStates, width: int) -> None:
        batch = len(pages.lengths)
        self.tokens = buffers.zeros("target tokens", (batch, width), torch.int64)
        self.positions = buffers.zeros("target positions", (batch, width), torch.int64)
        self.kept = buffers.zeros("kept", (batch,), torch.int32)
        self.hidden = buffers.zeros("target hidden", (batch, width, spec.hidden_size))
        has_taps = spec.mtp is not None and bool(spec.mtp.taps)
        self.tap = buffers.zeros("tap", (batch, width, spec.tap_width)) if has_taps else self.hidden
        self._executor, self._pages, self._delta, self._width = buffers.executor, pages, delta, width
        self._bound: dict[int, Enqueue] = {}

    def enqueue(self, newest: int) -> None:
        """Run over `tokens` behind the committed rows, `newest` being the set of staged rows of the last call."""
        self.positions.copy_(self._pages.positions(self._pages.lengths, self._width))
        self._pages.load()
        self._delta.load(newest)
        if newest not in self._bound:
            feeds = {
                names.INPUT_IDS: self.tokens,
                names.POSITION_IDS: self.positions,
                names.KEPT_ROWS: self.kept,
                **self._pages.feeds(),
                **self._delta.feeds(newest),
            }
            into = {names.HIDDEN: self.hidden, **self._pages.into(), **self._delta.into(newest)}
            if self.tap is not self.hidden:
                into[names.TAP] = self.tap
            self._bound[newest] = self._executor.bind("backbone", feeds, into)
        self._bound[newest]()
        self._delta.store(newest)


class HeadRows(NamedTuple):
    """float32[batch, rows, hidden_size]: for the vocabulary head, and for the next draft step."""

    output: Tensor
    chain: Tensor


class HeadRun:
    """The draft head over `width` rows of every sequence."""

    def __init__(self, buffers: Buffers, spec: ModelSpec, pages: Caches, width: int, *, chained: bool) -> None:
        assert spec.mtp is not None
        mtp: MtpSpec = spec.mtp
        batch, kind = len(pages.lengths), "chained" if chained else "head"
        self.tokens = buffers.zeros(f"{kind} tokens", (batch, width), torch.int64)
        self._positions = buffers.zeros(f"{kind} positions", (batch, width), torch.int64)
        self._lengths = buffers.zeros("head lengths", (batch,), torch.int32)
        own = chained and mtp.tap_projection
        taps = buffers.zeros(f"{kind} taps", (batch, 0 if own else width, spec.tap_width))
        chain = buffers.zeros(f"{kind} chain", (batch, width if own else 0, mtp.hidden_size))
        self.hidden = chain if own else taps
        output = buffers.zeros(f"{kind} output", (batch, width, mtp.hidden_size))
        apart = mtp.chain == "residual" and mtp.output_norm
        self.rows = HeadRows(output, buffers.zeros(f"{kind} chained on", output.shape) if apart else output)
        feeds = {
            names.INPUT_IDS: self.tokens,
            names.tap_of(mtp): taps,
            names.CHAIN: chain,
            names.POSITION_IDS: self._positions,
            **pages.feeds(),
            names.PAST_LENGTH: self._lengths,
        }
        into = {names.HIDDEN_OUT: output, **pages.into()}
        if apart:
            into[names.CHAIN_OUT] = self.rows.chain
        self._pages, self._width = pages, width
        self._enqueue = buffers.executor.bind("mtp", feeds, into)

    def enqueue(self, lengths: Tensor) -> HeadRows:
        """Run over `tokens` and `hidden` behind int32[batch] rows of the cache."""
        self._lengths.copy_(lengths)
        self._positions.copy_(self._pages.positions(lengths, self._width))
        self._pages.load()
        self._enqueue()
        return self.rows
