"""Vocabulary heads over fixed numbers of rows."""

from __future__ import annotations

import torch

from mtp_engines.backends.gpu.executor import Executor, Graph
from mtp_engines.contracts import names
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.lowering.heads import CHECKSUM, IDS

Tensor = torch.Tensor


class Scoring:
    """The vocabulary heads of target and draft, for any number of sequences."""

    def __init__(self, executor: Executor, spec: ModelSpec) -> None:
        self._executor, self._spec = executor, spec
        self._runs: dict[tuple[Graph, int, bool], _Run] = {}
        self._logits: dict[Graph, Tensor] = {}

    def choose(self, graph: Graph, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """int64[batch, rows] ids for float32[batch, rows, width], and bool[batch, rows], whether they were numbers."""
        return self._run(graph, hidden, scores=False).enqueue(hidden)

    def score(self, graph: Graph, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `choose`, and the logits they were chosen from, float32[batch, rows, vocab_size], until the next call."""
        run = self._run(graph, hidden, scores=True)
        ids, finite = run.enqueue(hidden)
        return ids, finite, run.logits.reshape(*hidden.shape[:2], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[rows, vocab_size] of the target for float32[rows, hidden_size]; for tools, not for the loop."""
        device = self._executor.device
        out = torch.zeros((len(hidden), self._spec.vocab_size), device=device)
        self._executor.bind("head", {names.HIDDEN: hidden.to(device)}, {names.LOGITS: out})()
        return out

    def _run(self, graph: Graph, hidden: Tensor, *, scores: bool) -> _Run:
        count = hidden.shape[0] * hidden.shape[1]
        key = (graph, count, scores)
        if key not in self._runs:
            logits = self._room(graph, count) if scores else None
            self._runs[key] = _Run(self._executor, graph, count, hidden.shape[-1], logits)
        return self._runs[key]

    def _room(self, graph: Graph, rows: int) -> Tensor:
        """One buffer for the logits of all runs: a row of a large vocabulary is a megabyte."""
        if graph not in self._logits or rows > len(self._logits[graph]):
            mtp, size = self._spec.mtp, self._spec.vocab_size
            if graph == "draft_head" and mtp is not None and mtp.draft_vocab_size is not None:
                size = mtp.draft_vocab_size
            self._logits[graph] = torch.zeros((rows, size), device=self._executor.device)
            self._runs = {known: run for known, run in self._runs.items() if known[0] != graph or not known[2]}
        return self._logits[graph][:rows]


class _Run:
    """A vocabulary head over a number of rows, all sequences together; `logits` are written where they are given."""

    def __init__(self, executor: Executor, graph: Graph, rows: int, width: int, logits: Tensor | None) -> None:
        device = executor.device
        self._hidden = torch.zeros((rows, width), device=device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._checksum = torch.zeros(rows, device=device)
        into = {IDS: self._ids, CHECKSUM: self._checksum}
        self.logits = self._checksum[:0]
        if logits is not None:
            into[names.LOGITS] = self.logits = logits
        self._enqueue = executor.bind(graph, {names.HIDDEN: self._hidden}, into)

    def enqueue(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        shape = hidden.shape[:2]
        self._hidden.copy_(hidden.reshape(self._hidden.shape))
        self._enqueue()
        return self._ids.reshape(shape), torch.isfinite(self._checksum).reshape(shape)
