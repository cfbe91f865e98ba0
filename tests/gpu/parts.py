"""Engines of the shared runner over small bundles, and greedy generation by each way that it offers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import pytest
import torch

from mtp_engines.backends.gpu import caches, pages
from mtp_engines.backends.gpu.sequences import DeviceSequences
from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph
from mtp_engines.backends.torch.engine import TorchEngine
from mtp_engines.bundle import Bundle
from mtp_engines.engine import Engine, Sequences
from mtp_engines.lowering.precision import Precision

CPU = torch.device("cpu")
Snapshots = dict[int, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Opened:
    """A bundle and the engine of ONNX Runtime over it."""

    bundle: Bundle
    engine: Engine

    def torch(self, precision: Precision = "fp32", *, skinny: bool = False, **limits: int) -> TorchEngine:
        """The bundle on PyTorch, on a CPU; limits: other ones than the bundle's, which the graphs do not know."""
        manifest = self.bundle.manifest
        return TorchEngine(
            manifest.model,
            replace(manifest.limits, **limits),
            load_graph,
            self.bundle.backbone,
            self.bundle.mtp,
            device=CPU,
            precision=precision,
            skinny=skinny,
        )


@dataclass
class Said:
    """One generation.

    Attributes:
        ids: all tokens, the first of the prompt's end included.
        accepted: kept drafts of each cycle.
        drafts: what was proposed in each cycle.
        states: snapshots by committed length.
    """

    ids: list[int]
    accepted: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    states: Snapshots = field(default_factory=dict)

    def look(self, sequences: Sequences, wanted: bool) -> None:
        """Remember the committed state."""
        if wanted:
            self.states[int(sequences.lengths[0])] = sequences.snapshot(0)

    def cut(self, count: int) -> list[int]:
        """The first tokens."""
        assert len(self.ids) >= count
        return self.ids[:count]


def plain(engine: Engine, prompt: Sequence[int], count: int, *, states: bool = False) -> Said:
    """One row after the other, without a draft; the reference."""
    sequences = engine.sequences()
    said = Said([int(x) for x in consume(sequences, prompt, engine)[0]])
    said.look(sequences, states)
    while len(said.ids) < count:
        verified = sequences.verify(np.array([[said.ids[-1]]]), 1)
        sequences.commit(np.array([1]))
        said.ids.append(int(verified.ids[0, 0]))
        said.look(sequences, states)
    return said


def consume(sequences: Sequences, prompt: Sequence[int], engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """A prompt in chunks: int64[1], the first token, and the hidden rows of all of it."""
    chunk, hidden = engine.limits.prefill_chunk, []
    for start in range(0, len(prompt), chunk):
        rows = np.array([prompt[start : start + chunk]])
        verified = sequences.verify(rows, 1)
        sequences.commit(np.array([rows.shape[1]]))
        hidden.append(verified.hidden.copy())
    return verified.ids[:, -1].copy(), np.concatenate(hidden, 1)


def by_host(
    engine: Engine, prompt: Sequence[int], count: int, schedule: int | Iterable[int], *, states: bool = False
) -> Said:
    """Draft, verify, accept and commit, with the host in between."""
    sequences = engine.sequences()
    first, hidden = consume(sequences, prompt, engine)
    said = Said([int(first[0])])
    said.look(sequences, states)
    waiting, rows = [*prompt[1:], said.ids[0]], hidden[0]
    for draft_tokens in _each(schedule):
        if len(said.ids) >= count:
            return said
        draft: list[int] = []
        if draft_tokens:
            waiting, rows = _catch_up(sequences, waiting, rows, engine.limits.prefill_chunk)
            given = np.array([waiting]), rows[None], np.array([len(waiting)])
            draft = sequences.draft(*given, draft_tokens)[0].tolist()
            waiting, rows = [], rows[:0]
        verified = sequences.verify(np.array([[said.ids[-1], *draft]]), len(draft) + 1)
        chosen = verified.ids[0].tolist()
        kept = next((at for at, token in enumerate(draft) if token != chosen[at]), len(draft))
        sequences.commit(np.array([kept + 1]))
        _enter(said, draft, chosen[: kept + 1])
        waiting, rows = [*waiting, *chosen[: kept + 1]], np.concatenate([rows, verified.hidden[0, : kept + 1]])
        said.look(sequences, states)
    raise AssertionError("the schedule is too short")


def by_cycles(
    engine: TorchEngine,
    prompt: Sequence[int],
    count: int,
    schedule: int | Iterable[int],
    *,
    drafting: bool = True,
    states: bool = False,
    sequences: DeviceSequences | None = None,
) -> Said:
    """Whole cycles of the runner."""
    sequences = sequences or engine.sequences()
    first = sequences.prefill(np.array([prompt]), drafting=drafting)
    said = Said([int(first[0])])
    said.look(sequences, states)
    for draft_tokens in _each(schedule):
        if len(said.ids) >= count:
            return said
        cycle = sequences.cycle(draft_tokens)
        _enter(said, cycle.draft[0], cycle.emitted[0])
        said.look(sequences, states)
    raise AssertionError("the schedule is too short")


def _enter(said: Said, draft: list[int], emitted: list[int]) -> None:
    said.drafts.append(draft)
    said.accepted.append(len(emitted) - 1)
    said.ids += emitted


def _catch_up(sequences: Sequences, waiting: list[int], rows: np.ndarray, chunk: int) -> tuple[list[int], np.ndarray]:
    """Let the head consume what is more than one chunk."""
    while len(waiting) > chunk:
        sequences.draft(np.array([waiting[:chunk]]), rows[None, :chunk], np.array([chunk]), 0)
        waiting, rows = waiting[chunk:], rows[chunk:]
    return waiting, rows


def _each(schedule: int | Iterable[int]) -> Iterable[int]:
    return repeat(schedule) if isinstance(schedule, int) else schedule


def state_error(ours: Snapshots, theirs: Snapshots) -> float:
    """The greatest difference of a state at any length that both know, as a share of its greatest value."""
    shared = ours.keys() & theirs.keys()
    assert len(shared) == len(ours) > 0, "plain decoding passes every length"
    worst = 0.0
    for length in shared:
        assert ours[length].keys() == theirs[length].keys()
        for name, value in theirs[length].items():
            assert ours[length][name].shape == value.shape
            worst = max(
                worst, float(np.abs(ours[length][name] - value).max(initial=0) / np.abs(value).max(initial=1e-6))
            )
    return worst


def small_pages(patch: pytest.MonkeyPatch) -> None:
    """Pages of 4 rows in sequences that are opened from now on."""
    for module in (pages, caches):
        patch.setattr(module, "PAGE_SIZE", 4)
