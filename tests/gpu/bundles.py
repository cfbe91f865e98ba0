"""Small bundles of every family, and graphs of them in plain ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from tests.fixtures.checkpoints import random_checkpoint
from tests.fixtures.dense_families import (
    eagle_checkpoint,
    mimo_checkpoint,
    partial_eagle_checkpoint,
    partial_mimo_checkpoint,
    partial_plain_checkpoint,
    plain_checkpoint,
)
from tests.fixtures.moe_families import MAKERS, partial_checkpoint
from tests.support import build_bundle

Maker = Callable[[Path], Path]


def _built(make: Callable[..., Path], **options: Any) -> Maker:
    return lambda place: build_bundle(make(place / "checkpoint", **options), place / "bundle")


def _with_draft(version: int, **options: Any) -> Maker:
    def make(place: Path) -> Path:
        target = plain_checkpoint(place / "target", seed=1)
        draft = eagle_checkpoint(place / "draft", target=target, seed=2, version=version, **options)
        return build_bundle(target, place / "bundle", draft_model=str(draft))

    return make


FAMILIES: dict[str, Maker] = {
    "hybrid": _built(random_checkpoint, seed=1),
    "llama": _built(plain_checkpoint, seed=1),
    "qwen2, with biases": _built(plain_checkpoint, seed=1, kind="qwen2"),
    "qwen3, with norms of heads": _built(plain_checkpoint, seed=1, kind="qwen3"),
    "mimo, another tap": _built(mimo_checkpoint, seed=1),
    "eagle": _with_draft(1),
    "eagle3, a smaller vocabulary": _with_draft(3, draft_vocab=40),
    **{f"experts of {name}": _built(make, seed=6) for name, make in MAKERS.items()},
}
"""Random weights, large enough that every state matters."""


def _partial_draft(version: int) -> Maker:
    def make(place: Path) -> Path:
        target = partial_plain_checkpoint(place / "target")
        draft = partial_eagle_checkpoint(place / "draft", target=target, version=version)
        return build_bundle(target, place / "bundle", draft_model=str(draft))

    return make


def _partial_experts(family: str) -> Maker:
    return lambda place: build_bundle(partial_checkpoint(family, place / "checkpoint"), place / "bundle")


DRAFTING: dict[str, Maker] = {
    "mimo": _built(partial_mimo_checkpoint),
    "eagle": _partial_draft(1),
    "eagle3": _partial_draft(3),
    **{name: _partial_experts(name) for name in ("qwen3_next", "glm4_moe")},
}
"""Chains with noise, whose heads are right sometimes."""


def session(path: Path) -> ort.InferenceSession:
    """A canonical graph as it lies on disk."""
    options = ort.SessionOptions()
    options.log_severity_level = 3  # Plain TensorScatter warns that it copies.
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds_for(graph: ort.InferenceSession, *, batch: int, rows: int, capacity: int, seed: int) -> dict[str, np.ndarray]:
    """Values for every input: sequences of different lengths, states that are not empty."""
    generator = np.random.default_rng(seed)
    lengths = np.arange(3, 3 + 4 * batch, 4)
    sizes = {"batch": batch, "rows": rows, "capacity": capacity, "tap_rows": rows, "chain_rows": 0}
    feeds: dict[str, np.ndarray] = {}
    for value in graph.get_inputs():
        shape = [sizes.get(size, size) for size in value.shape]
        feeds[value.name] = generator.standard_normal(shape).astype(np.float32)
    feeds["input_ids"] = generator.integers(0, 64, (batch, rows))
    feeds["position_ids"] = lengths[:, None] + np.arange(rows)
    feeds["past_length"] = lengths
    feeds["logit_rows"] = np.array([rows - 1])
    return feeds
