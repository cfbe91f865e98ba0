"""What one draft token costs: the weights that it reads, and its time with the whole vocabulary and with a part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.backends.onnxruntime_cpu.mtp import ChainedHead, HeadGraph
from mtp_engines.backends.onnxruntime_cpu.sessions import load_graph, open_head, open_session
from mtp_engines.contracts.manifest import DraftVocabulary, Limits, WeightFormats
from mtp_engines.contracts.model import ModelSpec, MoeSpec
from mtp_engines.kernels.packing import packed_matrices
from mtp_engines.lowering.heads import head_models, without_head
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_exporter.prepare import Prepared
from mtp_exporter.storing.weights import stored_bytes

STEPS = 25
_WARM_UP = 3
_SECONDS = 2.0
"""Timing stops after so long, with however many steps were run."""
_ONE_THREAD_BYTES = 8 << 20
"""A step that reads less is over before a second thread is awake."""


def draft_weight_bytes(prepared: Prepared, formats: WeightFormats) -> int:
    """Bytes of weights that a draft token reads: the head's layer, one row of the embedding, the vocabulary head.

    Of a mixture of experts those that one token goes to. For heads of one trained depth.
    """
    mtp = prepared.spec.mtp
    assert mtp is not None and mtp.depth == 1
    mlp = mtp.layers[0].mlp
    total = 0
    for role, (need, _) in prepared.claimed.items():
        size = stored_bytes(need, formats)
        if role == ("mtp.embedding" if mtp.own_embedding else "embedding"):
            total += size // need.shape[0]
        elif ".mlp.experts." in role and role.startswith("mtp."):
            assert isinstance(mlp, MoeSpec)
            total += size // need.shape[0] * mlp.top_k
        elif role.startswith("mtp.") and role != "mtp.ids":
            total += size
    return total if mtp.own_head else total + stored_bytes(prepared.claimed["head"][0], formats)


def time_draft_step(
    spec: ModelSpec,
    limits: Limits,
    backbone: Path,
    head: Path,
    vocabulary: DraftVocabulary,
    advance: Callable[[int], None] = lambda steps: None,
) -> DraftVocabulary:
    """Time draft tokens with both vocabularies in turns, through the engine's own parts.

    Args:
        backbone: the written graph, which has the whole vocabulary head.
        head: the written graph of the head that was cut down.
        vocabulary: what is known; it comes back as it is where memory does not hold the sessions.
        advance: told of every step that was timed.
    """
    assert spec.mtp is not None
    # ONNX Runtime packs a copy of every matrix; the file itself is mapped.
    needed = 2 * (vocabulary.step.weight_bytes + vocabulary.step_whole.weight_bytes)
    if needed > _available_bytes():
        return vocabulary
    threads = 1 if vocabulary.step_whole.weight_bytes < _ONE_THREAD_BYTES else 0
    folder, width = backbone.parent, spec.mtp.hidden_size
    packed = packed_matrices()
    opened = partial(open_session, folder=folder, threads=threads)
    layer = opened(lower(without_head(load_graph(head)), packed=packed))
    heads = []
    for graph in (head, backbone):
        sessions = open_head(head_models(load_graph(graph), packed), opened)
        heads.append(ChainedHead(HeadGraph.of_depth(layer, spec, 0, limits, 1), 1, VocabularyHead(sessions, width)))
    tokens, rows = np.zeros((1, 1), np.int64), np.ones(1, np.int64)
    hidden = np.random.default_rng(0).standard_normal((1, 1, spec.tap_width), np.float32)
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + _SECONDS
    while len(taken[0]) < _WARM_UP + STEPS and (len(taken[0]) <= _WARM_UP or time.perf_counter() < end):
        for chained, times in zip(heads, taken, strict=True):
            chained.reset()
            start = time.perf_counter()
            chained.draft(tokens, hidden, rows, 1)
            times.append(1000 * (time.perf_counter() - start))
        advance(1)
    part, whole = (round(median(times[_WARM_UP:]), 4) for times in taken)
    return replace(
        vocabulary,
        step=replace(vocabulary.step, milliseconds=part),
        step_whole=replace(vocabulary.step_whole, milliseconds=whole),
    )


def _available_bytes() -> int:
    """Memory that can be taken without swapping; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
