"""The policy `auto` of a loaded model: which costs its drafter has, and what acceptance to expect at first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from mtp_engines.backends.options import EngineOptions
from mtp_engines.bundle import Bundle
from mtp_engines.contracts.manifest import Manifest
from mtp_engines.cost_cache import costs_of
from mtp_engines.costs import CycleCosts
from mtp_engines.engine import Engine
from mtp_runtime.drafters.registry import base_of
from mtp_runtime.policy import AutoPolicy, Tuning

_TRUST = 8.0
"""Drafts of the build's short text that weigh as much as the expectation without it."""


@dataclass(frozen=True)
class Opened:
    """A bundle, its engine, and how that was opened."""

    bundle: Bundle
    engine: Engine
    options: EngineOptions


class Auto:
    """Makes policies; costs are measured, or read from the bundle, when they are first needed."""

    def __init__(self, target: Opened, draft: Opened | None = None) -> None:
        self._target, self._draft = target, draft
        self._lock = threading.Lock()
        self._found: dict[tuple[bool, bool, int], CycleCosts] = {}

    def policy(
        self,
        drafter: str,
        prompt_tokens: int,
        *,
        whole: bool = False,
        measured: bool = True,
        together: Callable[[], CycleCosts] | None = None,
        tuning: Tuning | None = None,
    ) -> AutoPolicy:
        """A policy for one generation.

        Args:
            drafter: its name; a lookup before it is taken to cost what the drafter behind it does.
            whole: the backend's own cycles run.
            measured: expect the acceptance that the build measured, where it did.
            together, tuning: see `AutoPolicy`.
        """
        base = base_of(drafter)
        waiting = 0 if whole else min(prompt_tokens, self._target.engine.limits.prefill_chunk)
        own = base not in ("ngram", "draft-model")
        prior = expected_acceptance(self._target.bundle.manifest) if own and measured else None
        return AutoPolicy(self.costs(drafter, whole=whole), waiting, prior, tuning, together)

    def measure(self, answers: int) -> None:
        """Measure, or read, the costs of 1, 2, 4, ... answers that run together, up to a number of them."""
        for size in _sizes(answers):
            self._costs(of_draft=False, whole=False, answers=size)

    def costs(self, drafter: str, *, answers: int = 1, whole: bool = False) -> CycleCosts:
        """Costs of cycles with a drafter."""
        base, target = base_of(drafter), self._costs(of_draft=False, whole=whole, answers=answers)
        if base == "ngram":
            return replace(target, draft=(0.0,) * len(target.draft), catch_up=0.0)
        if base == "draft-model":
            return with_draft_model(target, self._costs(of_draft=True, whole=False))
        return target

    def known(self, drafter: str, answers: int) -> CycleCosts:
        """Costs of the largest company that was measured and is not larger than this one; nothing is measured here."""
        known = [size for size in _sizes(answers) if (False, False, size) in self._found]
        return self.costs(drafter, answers=max(known, default=1))

    def _costs(self, *, of_draft: bool, whole: bool, answers: int = 1) -> CycleCosts:
        with self._lock:
            if (of_draft, whole, answers) not in self._found:
                opened = self._draft if of_draft else self._target
                assert opened is not None, "a request for a draft model is refused where none was loaded"
                found = costs_of(opened.bundle, opened.engine, opened.options, answers=answers, whole=whole)
                self._found[of_draft, whole, answers] = found
            return self._found[of_draft, whole, answers]


def _sizes(most: int) -> list[int]:
    """1, 2, 4, ... and the greatest number itself."""
    return sorted({1 << power for power in range(most.bit_length()) if 1 << power <= most} | {most})


def with_draft_model(target: CycleCosts, draft: CycleCosts) -> CycleCosts:
    """Costs of a target whose drafts come from another model.

    That verifies its newest row, then the drafts that it has made as blocks of 1, 2, ... rows; further than it was
    measured, a block costs what the widest one does.
    """
    blocks = [draft.verify[0], *draft.verify, *(draft.verify[-1:] * len(target.draft))]
    further = (draft.verify[-1] - draft.verify[0]) / max(len(draft.verify) - 1, 1)
    return replace(target, draft=tuple(accumulate(blocks[: len(target.draft)])), catch_up=further)


def expected_acceptance(manifest: Manifest) -> float | None:
    """What the build's short text says of the head, drawn towards one half since it is short; None if nothing."""
    found = manifest.draft_agreement
    if found is None or not found.drafted:
        return None
    return (found.accepted + _TRUST / 2) / (found.drafted + _TRUST)
