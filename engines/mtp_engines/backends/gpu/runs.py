"""Runs of the graphs at fixed widths: static buffers, bound once, enqueued often."""

from __future__ import annotations

from typing import NamedTuple

import torch

from mtp_engines.backends.gpu.executor import Enqueue, Executor, Graph
from mtp_engines.backends.gpu.state import Caches, DeltaStates
from mtp_engines.contracts import names
from mtp_engines.contracts.model import ModelSpec, MtpSpec
from mtp_engines.lowering.heads import CHECKSUM, IDS

Tensor = torch.Tensor


class TargetRun:
    """The backbone over `width` rows of every sequence."""

    def __init__(self, executor: Executor, spec: ModelSpec, pages: Caches, delta: DeltaStates, width: int) -> None:
        batch, device = len(pages.lengths), executor.device
        self.tokens = torch.zeros((batch, width), dtype=torch.int64, device=device)
        self.positions = torch.zeros((batch, width), dtype=torch.int64, device=device)
        self.kept = torch.zeros(batch, dtype=torch.int32, device=device)
        self.hidden = torch.zeros((batch, width, spec.hidden_size), device=device)
        has_taps = spec.mtp is not None and bool(spec.mtp.taps)
        self.tap = torch.zeros((batch, width, spec.tap_width), device=device) if has_taps else self.hidden
        self._executor, self._pages, self._delta, self._width = executor, pages, delta, width
        self._bound: dict[int, Enqueue] = {}

    def enqueue(self, newest: int) -> None:
        """Run over `tokens` behind the committed rows, `newest` being the set of staged rows of the last call."""
        self.positions.copy_(self._pages.positions(self._pages.lengths, self._width))
        if newest not in self._bound:
            feeds = {
                names.INPUT_IDS: self.tokens,
                names.POSITION_IDS: self.positions,
                names.PAST_LENGTH: self._pages.lengths,
                names.KEPT_ROWS: self.kept,
                **self._pages.feeds(),
                **self._delta.feeds(newest),
            }
            into = {names.HIDDEN: self.hidden, **self._pages.into(), **self._delta.into(newest)}
            if self.tap is not self.hidden:
                into[names.TAP] = self.tap
            self._bound[newest] = self._executor.bind("backbone", feeds, into)
        self._bound[newest]()


class HeadRows(NamedTuple):
    """float32[batch, rows, hidden_size]: for the vocabulary head, and for the next draft step."""

    output: Tensor
    chain: Tensor


class HeadRun:
    """The draft head over `width` rows of every sequence."""

    def __init__(self, executor: Executor, spec: ModelSpec, pages: Caches, width: int, *, chained: bool) -> None:
        assert spec.mtp is not None
        mtp: MtpSpec = spec.mtp
        batch, device = len(pages.lengths), executor.device
        self.tokens = torch.zeros((batch, width), dtype=torch.int64, device=device)
        self._positions = torch.zeros((batch, width), dtype=torch.int64, device=device)
        self._lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        own = chained and mtp.tap_projection
        taps = torch.zeros((batch, 0 if own else width, spec.tap_width), device=device)
        chain = torch.zeros((batch, width if own else 0, mtp.hidden_size), device=device)
        self.hidden = chain if own else taps
        output = torch.zeros((batch, width, mtp.hidden_size), device=device)
        apart = mtp.chain == "residual" and mtp.output_norm
        self.rows = HeadRows(output, torch.zeros_like(output) if apart else output)
        feeds = {
            names.INPUT_IDS: self.tokens,
            names.tap_of(mtp): taps,
            names.CHAIN: chain,
            names.POSITION_IDS: self._positions,
            names.PAST_LENGTH: self._lengths,
            **pages.feeds(),
        }
        into = {names.HIDDEN_OUT: output, **pages.into()}
        if apart:
            into[names.CHAIN_OUT] = self.rows.chain
        self._pages, self._width = pages, width
        self._enqueue = executor.bind("mtp", feeds, into)

    def enqueue(self, lengths: Tensor) -> HeadRows:
        """Run over `tokens` and `hidden` behind int32[batch] rows of the cache."""
        self._lengths.copy_(lengths)
        self._positions.copy_(self._pages.positions(lengths, self._width))
        self._enqueue()
        return self.rows


class Vocabulary:
    """A vocabulary head over a fixed number of rows."""

    def __init__(
        self, executor: Executor, graph: Graph, shape: tuple[int, int], width: int, vocab_size: int | None = None
    ) -> None:
        """`shape` is batch and rows; `width` is that of a hidden row; with `vocab_size` the logits are kept."""
        self._shape = shape
        rows, device = shape[0] * shape[1], executor.device
        self._hidden = torch.zeros((rows, width), device=device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._checksum = torch.zeros(rows, device=device)
        into = {IDS: self._ids, CHECKSUM: self._checksum}
        self.logits: Tensor | None = None
        """float32[batch, rows, vocab_size] of the newest run, where they are kept."""
        if vocab_size is not None:
            logits = into[names.LOGITS] = torch.zeros((rows, vocab_size), device=device)
            self.logits = logits.reshape(*shape, vocab_size)
        self._enqueue = executor.bind(graph, {names.HIDDEN: self._hidden}, into)

    def enqueue(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """int64[batch, rows] ids and bool[batch, rows], whether their logits were numbers."""
        self._hidden.copy_(hidden.reshape(self._hidden.shape))
        self._enqueue()
        return self._ids.reshape(self._shape), torch.isfinite(self._checksum).reshape(self._shape)
