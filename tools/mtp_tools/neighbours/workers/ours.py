"""Our own runtime, driven as `mtp-run bench` drives it; the one worker that runs where this project is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime

from mtp_runtime.api import load as load_model
from mtp_runtime.request import DraftTokens
from mtp_tools.bench.answers import Task, answer
from mtp_tools.bench.cases import PLAIN, Case


class Engine:
    """One bundle."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._model = load_model(Path(settings["bundle"]), settings["threads"])
        self._acceptance, self._seed = settings["acceptance"], settings["seed"]
        self.draft_tokens = (0, *settings["draft_tokens"])
        self.about = {"onnxruntime": onnxruntime.__version__}
        if self._acceptance is not None and settings["draft_tokens"]:
            self.about["drafts"] = f"the head drafts, then {self._acceptance:g} of the drafts are made right by force"
        self._continuations: dict[tuple[int, ...], tuple[int, ...]] = {}

    def answer(self, prompt: list[int], new_tokens: int, draft_tokens: DraftTokens) -> dict[str, Any]:
        """Forced drafts need the plain continuation: it is made once, outside the time."""
        known: tuple[int, ...] = ()
        if draft_tokens and self._acceptance is not None:
            known = self._continuation(prompt, new_tokens)
        case = Case(draft_tokens, self._acceptance) if draft_tokens else PLAIN
        found = answer(self._model, Task(prompt, known, new_tokens, self._seed, host_loop=True), case)
        counts = found.stats.as_dict()
        return {
            "ids": list(found.token_ids),
            "first_s": found.prefill_s,
            "total_s": found.prefill_s + sum(cycle.wall for cycle in found.cycles),
            "drafted": counts["drafted"],
            "accepted": counts["accepted"],
        }

    def _continuation(self, prompt: list[int], new_tokens: int) -> tuple[int, ...]:
        known = self._continuations.get(tuple(prompt), ())
        if len(known) < new_tokens:
            known = answer(self._model, Task(prompt, (), new_tokens), PLAIN).token_ids
            self._continuations[tuple(prompt)] = known
        return known


def load(settings: dict[str, Any]) -> Engine:
    """Settings: bundle, threads, draft_tokens, acceptance (of forced drafts, or None), seed (of forced drafts)."""
    return Engine(settings)
