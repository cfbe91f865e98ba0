"""Everything that sequences hold on their device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mtp_engines.backends.gpu.caches import CachePages, Caches, DenseCaches, PageTable
from mtp_engines.backends.gpu.capture import Captures
from mtp_engines.backends.gpu.executor import Executor, Graph
from mtp_engines.backends.gpu.runs import Buffers, HeadRows, HeadRun, TargetRun
from mtp_engines.backends.gpu.scoring import Scoring
from mtp_engines.backends.gpu.state import DeltaStates
from mtp_engines.backends.gpu.widths import Widths
from mtp_engines.checks import refuse_cache_rows
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, ModelSpec
from mtp_engines.engine import Choose, Floats, Ids
from mtp_engines.errors import BundleError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Setup:
    """An opened bundle on a GPU backend.

    Attributes:
        graphs: False runs every cycle eagerly, where CUDA graphs could be used.
    """

    executor: Executor
    spec: ModelSpec
    limits: Limits
    widths: Widths
    graphs: bool = True


@dataclass(frozen=True)
class Memory:
    """What is in a device's memory for some sequences.

    Attributes:
        pages, head_pages: caches of the target and of the draft head, if there is one.
        delta: recurrent states.
    """

    pages: Caches
    head_pages: Caches | None
    delta: DeltaStates

    @classmethod
    def empty(cls, setup: Setup, batch: int, cache_rows: int | None = None) -> Memory:
        """For `batch` sequences, which share `cache_rows` rows of the caches, if that is not None.

        Raises:
            BundleError: the draft head has a form that these backends do not run yet.
            RequestError: caches are not in pages, so that nothing can be shared.
        """
        executor, spec, limits = setup.executor, setup.spec, setup.limits
        if not executor.paged:
            refuse_cache_rows(cache_rows)
        # One table for target and head, whose rows lie at the same positions.
        table = PageTable(limits, batch, executor.device, cache_rows) if executor.paged else None

        def caches(layers: dict[int, AttentionSpec]) -> Caches:
            if table is None:
                return DenseCaches.empty(layers, limits, batch, executor.device, executor.cache_dtype)
            return CachePages.empty(layers, limits, table, executor.cache_dtype)

        head = _head_mixer(spec)
        return cls(
            caches({index: mixer for index, mixer in spec.cached_layers() if isinstance(mixer, AttentionSpec)}),
            None if head is None else caches({0: head}),
            DeltaStates.empty(spec, batch, setup.widths.widest, executor.device),
        )

    def window(self, start: int, stop: int) -> Memory:
        """That of some of the sequences."""
        head = None if self.head_pages is None else self.head_pages.window(start, stop)
        return Memory(self.pages.window(start, stop), head, self.delta.window(start, stop))


class Device:
    """Memory of neighbouring sequences, and the runs over it."""

    def __init__(self, setup: Setup, memory: Memory, whole: Device | None = None) -> None:
        """Of all sequences of a batch, or of some of those of `whole`."""
        self._setup = setup
        self.executor, self.spec, self.limits, self.widths = setup.executor, setup.spec, setup.limits, setup.widths
        self.pages, self.head_pages, self.delta = memory.pages, memory.head_pages, memory.delta
        self.batch = len(memory.pages.lengths)
        self._memory = memory
        self.captures: Captures
        if whole is None:
            enabled = setup.graphs and setup.executor.capturable
            self.captures = Captures(setup.executor.device, enabled=enabled)
            self._buffers, self._scoring = Buffers(setup.executor), Scoring(setup.executor, setup.spec)
        else:
            self.captures, self._buffers, self._scoring = whole.captures, whole._buffers, whole._scoring
        self._targets: dict[int, TargetRun] = {}
        self._heads: dict[tuple[int, bool], HeadRun] = {}
        self._windows: dict[tuple[int, int], Device] = {}

    @classmethod
    def empty(cls, setup: Setup, batch: int, cache_rows: int | None = None) -> Device:
        """Memory and runs for a batch; see `Memory.empty`."""
        return cls(setup, Memory.empty(setup, batch, cache_rows))

    def window(self, start: int, count: int) -> Device:
        """Some of the sequences, in the same memory; what was bound and captured for them is kept."""
        if count == self.batch:
            return self
        if (start, count) not in self._windows:
            self._windows[start, count] = Device(self._setup, self._memory.window(start, start + count), self)
        return self._windows[start, count]

    def target(self, width: int) -> TargetRun:
        """The backbone at a width."""
        if width not in self._targets:
            self._targets[width] = TargetRun(self._buffers, self.spec, self.pages, self.delta, width)
        return self._targets[width]

    def head(self, width: int, *, chained: bool = False) -> HeadRun:
        """The draft head at a width; chained steps of some heads take another input."""
        assert self.head_pages is not None
        key = (width, chained)
        if key not in self._heads:
            self._heads[key] = HeadRun(self._buffers, self.spec, self.head_pages, width, chained=chained)
        return self._heads[key]

    def choices(self, hidden: Tensor, *, logits: bool) -> tuple[Ids, npt.NDArray[np.bool_], Floats | None]:
        """On the host: choices of any number of rows, each at one width whatever their number.

        Returns:
            int64[batch, rows]; bool[batch, rows], which were numbers; and with `logits` what they were chosen from,
            float32[batch, rows, vocab_size].
        """
        batch, rows, width = hidden.shape
        ids = np.zeros((batch, rows), np.int64)
        finite = np.ones((batch, rows), np.bool_)
        scored = np.zeros((batch, rows, self.spec.vocab_size), np.float32) if logits else None
        for start in range(0, rows, self.widths.widest):
            part = hidden[:, start : start + self.widths.widest]
            here, count = slice(start, start + part.shape[1]), part.shape[1]
            wide = torch.zeros((batch, self.widths.fit(count), width), device=hidden.device)
            wide[:, :count] = part
            if scored is None:
                chosen, numbers = self.choose(wide)
            else:
                chosen, numbers, scores = self.score(wide)
                scored[:, here] = scores[:, :count].float().cpu().numpy()
            ids[:, here], finite[:, here] = chosen[:, :count].cpu().numpy(), numbers[:, :count].cpu().numpy()
        return ids, finite, scored

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The target's choices for float32[batch, rows, hidden_size], and which rows were numbers."""
        return self._scoring.choose("head", hidden)

    def score(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `choose`, and the logits they were chosen from, float32[batch, rows, vocab_size]."""
        return self._scoring.score("head", hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[rows, vocab_size] for float32[rows, hidden_size]; for tools, not for the loop."""
        return self._scoring.logits(hidden)

    def choose_draft(self, hidden: Tensor) -> Tensor:
        """int64[batch], the draft head's choice for float32[batch, 1, hidden_size]."""
        ids, _ = self._scoring.choose(self._draft_graph, hidden)
        return ids[:, 0]

    def draw_draft(self, hidden: Tensor, choose: Choose) -> Tensor | None:
        """int64[batch], drafts that the host chooses; None if a logit was no number, or the host ends the draft."""
        _, finite, logits = self._scoring.score(self._draft_graph, hidden)
        if not bool(finite.all()):
            return None
        ids = choose(logits[:, 0].float().cpu().numpy())
        return None if ids is None else torch.from_numpy(ids).to(hidden.device)

    def chain(self, last: HeadRows, lengths: Tensor, draft_tokens: int, choose: Choose | None = None) -> list[Tensor]:
        """Draft from the row of the newest token, int64[batch] each; with `choose` the host makes each choice.

        Chained rows stand in the cache behind `lengths` and are written over by the next committed rows.
        """
        drafted: list[Tensor] = []
        for depth in range(draft_tokens):
            if depth:
                run = self.head(1, chained=True)
                run.tokens[:, 0] = drafted[-1]
                run.hidden.copy_(last.chain)
                last = run.enqueue(lengths + (depth - 1))
            # A copy, since the head writes the next choice to the same place.
            ids = self.choose_draft(last.output).clone() if choose is None else self.draw_draft(last.output, choose)
            if ids is None:
                break
            drafted.append(ids)
        return drafted

    @property
    def _draft_graph(self) -> Graph:
        assert self.spec.mtp is not None
        return "draft_head" if self.spec.mtp.own_head else "head"

    def reset(self) -> None:
        """Forget everything."""
        self.pages.reset()
        self.delta.reset()
        if self.head_pages is not None:
            self.head_pages.reset()


def _head_mixer(spec: ModelSpec) -> AttentionSpec | None:
    """The attention of the draft head, if there is a head.

    Raises:
        BundleError: it has several depths.
    """
    if spec.mtp is None:
        return None
    if spec.mtp.depth > 1:
        raise BundleError(
            f"The draft head has {spec.mtp.depth} trained depths; the GPU backends run heads of one. Build the "
            "bundle with --no-mtp, or run it with --backend onnxruntime."
        )
    (mixer,) = (mixer for mixer in spec.head_mixers() if isinstance(mixer, AttentionSpec))
    return mixer


def rows_at(rows: HeadRows, places: Tensor) -> HeadRows:
    """Row places[b] of every sequence, [batch, 1, width]; a place below 0 gives some row."""
    index = places.to(torch.int64).clamp_min(0)[:, None, None]
    output, chain = (x.gather(1, index.expand(-1, 1, x.shape[-1])) for x in rows)
    return HeadRows(output, chain)
