"""Bundles of mixture-of-experts checkpoints beside their float64 models, and rows run through them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtp_engines.backends.onnxruntime_cpu.head import VocabularyHead
from mtp_engines.contracts import names
from mtp_runtime import Model
from tests.fixtures.head_rows import every_row
from tests.fixtures.moe_families import MAKERS, partial_checkpoint
from tests.oracles.float64_checkpoint import Array
from tests.oracles.moe_families import FamilyOracle, Forward, open_oracle
from tests.support import build_bundle, load_model

IDS: list[int] = np.random.default_rng(0).integers(0, 64, 23).tolist()
# float32 moves the scores of experts by less than 5e-6 over a text; a choice as near as twice that may fall
# otherwise in float32, and then everything after it.
MARGIN = 2e-5
# Some seeds have rows whose delta net gives nearly nothing, which its norm then magnifies, in transformers too.
SEEDS = {"qwen3_next": 12, "qwen3_5_moe": 6, "deepseek_v3": 6, "glm4_moe": 6}


@dataclass(frozen=True)
class Case:
    """A checkpoint, its loaded bundle and its float64 model."""

    family: str
    checkpoint: Path
    model: Model
    oracle: FamilyOracle

    @cached_property
    def target(self) -> Forward:
        """The float64 target over IDS."""
        return self.oracle.forward(IDS)


def random_case(place: Path, family: str, build: dict[str, Any] | None = None, **options: Any) -> Case:
    """Random weights; build: options of the build, options: of the maker."""
    return case_of(family, MAKERS[family](place / "checkpoint", **options), place / "bundle", build)


def partial_case(place: Path, family: str, build: dict[str, Any] | None = None, **options: Any) -> Case:
    """A chain with noise, of which some drafts are right."""
    return case_of(family, partial_checkpoint(family, place / "checkpoint", **options), place / "bundle", build)


def case_of(family: str, checkpoint: Path, bundle: Path, build: dict[str, Any] | None = None) -> Case:
    """Build a checkpoint at `bundle` and open both."""
    build_bundle(checkpoint, bundle, **{"draft_tokens": 3, **(build or {})})
    return Case(family, checkpoint, load_model(bundle), open_oracle(checkpoint))


def run_target(model: Model, blocks: list[int], ids: list[int] = IDS) -> tuple[Array, Array, dict[str, Array]]:
    """Hidden states, logits and final states of `ids`, run and committed in blocks of the given sizes."""
    sequences = model.engine.sequences()
    hidden, start = [], 0
    for size in blocks:
        hidden.append(sequences.verify(np.array([ids[start : start + size]]), 0).hidden[0].copy())
        sequences.commit(np.array([size]))
        start += size
    rows = np.concatenate(hidden)
    return rows, sequences.logits(rows), sequences.snapshot(0)


def run_head(model: Model, next_ids: list[int], hidden: Array) -> tuple[Array, Array]:
    """The head's states and logits over rows (t_{p+1}, h_p), p from 0, with an empty cache."""
    sessions, spec = model.engine.sessions, model.engine.spec  # type: ignore[attr-defined]
    feed = {
        names.INPUT_IDS: np.array([next_ids]),
        names.HIDDEN: hidden[None].astype(np.float32),
        names.POSITION_IDS: np.arange(len(next_ids))[None],
        names.PAST_LENGTH: np.zeros(1, np.int64),
    }
    for value in sessions.mtp[0].get_inputs():
        if names.is_cache(value.name):
            _, heads, _, width = value.shape
            feed[value.name] = np.zeros((1, heads, model.engine.limits.capacity, width), np.float32)
    out = every_row(sessions.mtp[0], feed)[names.HIDDEN_OUT]
    # With an output head of its own the head scores with that.
    return out[0], VocabularyHead(sessions.draft_head or sessions.head, spec.hidden_size).logits(out[0])
