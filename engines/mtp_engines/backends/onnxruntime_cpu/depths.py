"""Draft heads with several trained depths: draft j comes from depth j."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.backends.onnxruntime_cpu.mtp import ChainedHead, HeadGraph
from mtp_engines.backends.onnxruntime_cpu.sessions import Sessions
from mtp_engines.contracts.manifest import Limits
from mtp_engines.contracts.model import ModelSpec
from mtp_engines.engine import Choose, Floats, Ids


def draft_head(
    sessions: Sessions, spec: ModelSpec, limits: Limits, batch: int, head: VocabularyHead
) -> ChainedHead | DeepHead:
    """The draft head of a batch, with its own vocabulary head where it has one."""
    assert spec.mtp is not None
    graphs = [HeadGraph.of_depth(session, spec, depth, limits, batch) for depth, session in enumerate(sessions.mtp)]
    if sessions.draft_head is not None:
        head = VocabularyHead(sessions.draft_head, spec.mtp.hidden_size)
    return ChainedHead(graphs[0], batch, head) if len(graphs) == 1 else DeepHead(graphs, batch, head)


_NO_ROW: Floats = np.zeros((0, 0), np.float32)


class DeepHead:
    """Depth j, row p: the token j + 1 after position p, and the output of depth j - 1 (or the target) for row p.

    Depth j can finish row p only when that token is committed, so its finished rows trail those of depth 0
    by j. The rows in between are run with drafts in the place of tokens and run again in the next round.
    """

    def __init__(self, graphs: list[HeadGraph], batch: int, head: VocabularyHead) -> None:
        self._graphs, self._batch, self._head = graphs, batch, head
        self._finished: Ids = np.zeros((len(graphs), batch), np.int64)
        self._carry: npt.NDArray[np.object_] = np.empty((len(graphs), batch), object)
        """Output of each depth for its last finished row, float32[1, width], or no row."""
        self._carry[:] = [[_NO_ROW] * batch for _ in graphs]

    def draft(self, tokens: Ids, hidden: Floats, rows: Ids, draft_tokens: int, *, choose: Choose | None = None) -> Ids:
        """See `mtp_engines.engine.Sequences.draft`; no more than the trained depths are proposed."""
        before = self._finished[0].copy()
        known = [tokens[b, : rows[b]].tolist() for b in range(self._batch)]
        inputs = [hidden[b, : rows[b]] for b in range(self._batch)]
        drafted: list[Ids] = []
        for depth, graph in enumerate(self._graphs):
            proposing = depth < draft_tokens and len(drafted) == depth
            # At the start of a text depth j has no use for the first j tokens, drafts among them.
            skip = np.maximum(depth - before, 0)
            drafts = [[int(d[b]) for d in drafted if proposing] for b in range(self._batch)]
            wanted = [(known[b] + drafts[b])[skip[b] :] for b in range(self._batch)]
            counts = np.array([min(len(wanted[b]), len(inputs[b])) for b in range(self._batch)])
            outputs = self._run(graph, depth, wanted, inputs, counts)
            if proposing:
                ids = self._head.draw(np.stack([_last(output) for output in outputs]), choose)
                if ids is not None:
                    drafted.append(ids)
            finished = np.maximum(before + rows - depth, 0)
            inputs = self._next_inputs(depth, outputs, finished)
            self._finished[depth] = finished
        return np.stack(drafted, axis=1) if drafted else np.zeros((self._batch, 0), np.int64)

    def reset(self) -> None:
        """Empty the caches."""
        self._finished[:] = 0
        for place in np.ndindex(self._carry.shape):
            self._carry[place] = _NO_ROW

    def window(self, start: int, stop: int) -> DeepHead:
        """The head of some of the sequences, in the same memory."""
        window = DeepHead([graph.window(start, stop) for graph in self._graphs], stop - start, self._head)
        window._finished, window._carry = self._finished[:, start:stop], self._carry[:, start:stop]
        return window

    def _run(
        self, graph: HeadGraph, depth: int, tokens: list[list[int]], inputs: list[Floats], counts: Ids
    ) -> list[Floats]:
        """Run the rows of every sequence, the shorter ones padded; float32[count, width] each."""
        width = int(counts.max())
        if width == 0:
            return [np.zeros((0, inputs[0].shape[-1]), np.float32)] * self._batch
        padded = np.zeros((self._batch, width), np.int64)
        hidden = np.zeros((self._batch, width, inputs[0].shape[-1]), np.float32)
        for b, count in enumerate(counts):
            padded[b, :count], hidden[b, :count] = tokens[b][:count], inputs[b][:count]
        run = graph.run(padded, hidden, self._finished[depth])
        return [run.output[b, :count].copy() for b, count in enumerate(counts)]

    def _next_inputs(self, depth: int, outputs: list[Floats], finished: Ids) -> list[Floats]:
        """What the next depth consumes: the row that trailed before, then the rows of this run."""
        inputs = []
        for b, output in enumerate(outputs):
            carry: Floats = self._carry[depth, b]
            inputs.append(np.concatenate([carry, output]) if carry.size else output)
            new = int(finished[b] - self._finished[depth, b])
            if new > 0:
                self._carry[depth, b] = output[new - 1 : new]
        return inputs


def _last(output: Floats) -> Floats:
    """The last row, or zeros for a sequence that has none and whose drafts mean nothing."""
    return output[-1:] if len(output) else np.zeros((1, output.shape[-1]), np.float32)
