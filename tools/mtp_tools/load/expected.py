"""Answers that are known before the server is asked: those of the same bundle, one after another, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtp_engines.backends.options import EngineOptions
from mtp_runtime.api import Model, load
from mtp_tools.load.traffic import Ask, Lengths, draw_asks

_STOP_FROM = 4
"""Tokens of an answer before the text that shall stop it."""


@dataclass(frozen=True)
class Known:
    """A request and the answer to it."""

    ask: Ask
    token_ids: tuple[int, ...]
    text: str
    reason: str

    def begins_with(self, text: str) -> bool:
        """Whether an answer that was cut may have this text: the beginning, and what may have become a stop text.

        Whoever is cut does not learn whether it would have become one.
        """
        if self.text.startswith(text):
            return True
        rest = text.removeprefix(self.text)
        stops = self.ask.options.get("stop", ())
        return text.startswith(self.text) and any(stop.startswith(rest) and stop != rest for stop in stops)


def known_answers(
    bundle: Path, material: list[int], count: int, prompt: Lengths, answer: Lengths, seed: int
) -> list[Known]:
    """Requests of every kind with `Model.complete`'s answers: K fixed, off and auto, drawn with a seed, with stops."""
    model = load(bundle, options=EngineOptions())
    asks = draw_asks(material, count, prompt, answer, seed)
    random = np.random.default_rng(seed)
    known = []
    for one in asks:
        options = dict(_VARIANTS[one.number % len(_VARIANTS)])
        if "temperature" in options:
            options["seed"] = int(random.integers(1 << 31))
        known.append(_answer(model, replace(one, options=options)))
    return known + [_answer(model, stopped) for stopped in _stopped(model, known)]


_VARIANTS: Sequence[Mapping[str, Any]] = (
    {"draft_tokens": 3},
    {"draft_tokens": 0},
    {"draft_tokens": "auto"},
    {"draft_tokens": 1, "temperature": 0.8},
    {"draft_tokens": 2, "drafter": "ngram"},
    {"draft_tokens": 3, "repetition_penalty": 1.3},
)
"""Fields that the server and the runtime have under the same name."""


def _answer(model: Model, ask: Ask) -> Known:
    finished = model.complete(
        prompt_ids=list(ask.prompt_ids), max_new_tokens=ask.new_tokens, ignore_eos=True, **ask.options
    )
    return Known(ask, finished.token_ids, finished.text, finished.finish_reason)


def _stopped(model: Model, known: Sequence[Known]) -> list[Ask]:
    """Some of them again, each with a stop text out of the middle of its answer."""
    if model.prompts.tokenizer is None:
        return []
    found: list[Ask] = []
    for one in known[:: len(_VARIANTS)]:
        stop = model.prompts.tokenizer.decode(list(one.token_ids[_STOP_FROM : _STOP_FROM + 2])).strip()
        if stop and stop in one.text:
            found.append(replace(one.ask, number=len(known) + len(found), options={**one.ask.options, "stop": [stop]}))
    return found
