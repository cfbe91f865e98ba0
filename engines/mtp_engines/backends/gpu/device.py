"""Everything that a batch of sequences holds on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtp_engines.backends.gpu.capture import Captures
from mtp_engines.backends.gpu.executor import Executor, Graph
from mtp_engines.backends.gpu.runs import HeadRows, HeadRun, TargetRun, Vocabulary
from mtp_engines.backends.gpu.state import CachePages, Caches, DeltaStates, DenseCaches
from mtp_engines.backends.gpu.widths import Widths
from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import AttentionSpec, ModelSpec
from mtp_engines.engine import Choose
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


class Device:
    """Pages, states and runs of one batch.

    Raises:
        BundleError: the draft head has a form that these backends do not run yet.
    """

    def __init__(self, setup: Setup, batch: int) -> None:
        executor, spec, limits = setup.executor, setup.spec, setup.limits
        self.executor, self.spec, self.limits, self.batch, self.widths = executor, spec, limits, batch, setup.widths
        layers = {index: mixer for index, mixer in spec.cached_layers() if isinstance(mixer, AttentionSpec)}
        caches = CachePages if executor.paged else DenseCaches
        self.pages: Caches = caches(layers, limits, batch, executor.device, executor.cache_dtype)
        self.delta = DeltaStates(spec, batch, setup.widths.widest, executor.device)
        self.captures = Captures(executor.device, enabled=setup.graphs and executor.capturable)
        self.head_pages: Caches | None = None
        if spec.mtp is not None:
            if spec.mtp.depth > 1:
                raise BundleError(
                    f"The draft head has {spec.mtp.depth} trained depths; the GPU backends run heads of one. Build the "
                    "bundle with --no-mtp, or run it with --backend onnxruntime."
                )
            (mixer,) = (mixer for mixer in spec.head_mixers() if isinstance(mixer, AttentionSpec))
            self.head_pages = caches({0: mixer}, limits, batch, executor.device, executor.cache_dtype)
        self._targets: dict[int, TargetRun] = {}
        self._heads: dict[tuple[int, bool], HeadRun] = {}
        self._vocabularies: dict[tuple[Graph, int, bool], Vocabulary] = {}

    def target(self, width: int) -> TargetRun:
        """The backbone at a width."""
        if width not in self._targets:
            self._targets[width] = TargetRun(self.executor, self.spec, self.pages, self.delta, width)
        return self._targets[width]

    def head(self, width: int, *, chained: bool = False) -> HeadRun:
        """The draft head at a width; chained steps of some heads take another input."""
        assert self.head_pages is not None
        key = (width, chained)
        if key not in self._heads:
            self._heads[key] = HeadRun(self.executor, self.spec, self.head_pages, width, chained=chained)
        return self._heads[key]

    def choose(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The target's choices for float32[batch, rows, hidden_size], and which rows were numbers."""
        return self._vocabulary("head", hidden).enqueue(hidden)

    def score(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `choose`, and the logits they were chosen from, float32[batch, rows, vocab_size]."""
        return self._scored("head", hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32[rows, vocab_size] for float32[rows, hidden_size], for tools."""
        device = self.executor.device
        out = torch.zeros((len(hidden), self.spec.vocab_size), device=device)
        self.executor.bind("head", {names.HIDDEN: hidden.to(device)}, {names.LOGITS: out})()
        return out

    def choose_draft(self, hidden: Tensor) -> Tensor:
        """int64[batch], the draft head's choice for float32[batch, 1, hidden_size]."""
        ids, _ = self._vocabulary(self._draft_graph, hidden).enqueue(hidden)
        return ids[:, 0]

    def draw_draft(self, hidden: Tensor, choose: Choose) -> Tensor | None:
        """int64[batch], drafts that the host chooses; None if a logit was no number, or the host ends the draft."""
        _, finite, logits = self._scored(self._draft_graph, hidden)
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

    def _scored(self, graph: Graph, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        vocabulary = self._vocabulary(graph, hidden, scores=True)
        ids, finite = vocabulary.enqueue(hidden)
        assert vocabulary.logits is not None
        return ids, finite, vocabulary.logits

    def _vocabulary(self, graph: Graph, hidden: Tensor, *, scores: bool = False) -> Vocabulary:
        """A vocabulary head over so many rows; with `scores` one that keeps the logits."""
        batch, rows, width = hidden.shape
        key = (graph, rows, scores)
        if key not in self._vocabularies:
            mtp, vocab_size = self.spec.mtp, self.spec.vocab_size
            if graph == "draft_head" and mtp is not None and mtp.draft_vocab_size is not None:
                vocab_size = mtp.draft_vocab_size
            self._vocabularies[key] = Vocabulary(
                self.executor, graph, (batch, rows), width, vocab_size if scores else None
            )
        return self._vocabularies[key]

    def reset(self) -> None:
        """Forget everything."""
        self.pages.reset()
        self.delta.reset()
        if self.head_pages is not None:
            self.head_pages.reset()


def rows_at(rows: HeadRows, places: Tensor) -> HeadRows:
    """Row places[b] of every sequence, [batch, 1, width]; a place below 0 gives some row."""
    index = places.to(torch.int64).clamp_min(0)[:, None, None]
    output, chain = (x.gather(1, index.expand(-1, 1, x.shape[-1])) for x in rows)
    return HeadRows(output, chain)
