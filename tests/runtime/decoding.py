"""What the tests of sampling in the loop share: a small world with known laws, and generations of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from mtp_runtime import Finished, Model
from mtp_runtime.sampling import SamplingOptions
from tests.runtime.sampling.oracle import dense_law, joint_law, p_value

SIZE, SHARPNESS = 6, 1.5
PROMPT = [1, 2, 2]
END_TOKENS = (0,)
FALSE_ALARM = CAUGHT = 1e-9


def _laws() -> np.ndarray:
    weights = np.exp(SHARPNESS * np.random.default_rng(1).standard_normal((SIZE, SIZE)))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


TARGET = _laws()
"""float64[SIZE, SIZE]: row t has the probabilities after token t."""

# Every transform alone, at sizes that cut into laws of six tokens, and all together.
TRANSFORMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.6},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
    "repetition": {"temperature": 1.0, "repetition_penalty": 8.0},
    "frequency": {"temperature": 1.0, "frequency_penalty": 2.0},
    "presence": {"temperature": 1.0, "presence_penalty": 3.0},
    "bias": {"temperature": 1.0, "logit_bias": {0: 1.5, 4: -2.0, 5: -np.inf}},
    "bad words": {"temperature": 1.0, "bad_words": [[3], [0, 1], [4, 4], [2, 2, 5]]},
    "min new tokens": {"temperature": 1.0, "min_new_tokens": 2},
    "all": {
        "temperature": 0.8,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.5,
        "logit_bias": {1: 0.5},
        "min_new_tokens": 2,
        "bad_words": [[2, 3]],
    },
}


def expected_law(asked: dict[str, Any], length: int) -> dict[tuple[int, ...], float]:
    """The target's law of the first tokens, by the oracle; `asked` are options of a request."""
    names = {field.name for field in fields(SamplingOptions)}
    options = SamplingOptions(**{name: value for name, value in asked.items() if name in names})
    table = np.log(TARGET)

    def law(output: tuple[int, ...]) -> list[float]:
        newest = [*PROMPT, *output][-1]
        return dense_law(table[newest].tolist(), PROMPT, output, options, END_TOKENS)

    return joint_law(law, length)


def counted(
    model: Model, asked: dict[str, Any], length: int, runs: int, draft_tokens: int, **options: Any
) -> Counter[tuple[int, ...]]:
    """How often each text came first, over as many answers to one request.

    The answers are longer, since the last cycles of one draft no more than fits.
    """
    ends = {"ignore_eos": not asked.get("min_new_tokens")}
    asked = {"prompt_ids": PROMPT, "max_new_tokens": length + draft_tokens, "n": runs, "seed": 5, **ends, **asked}
    answers = model.complete_all(**asked, draft_tokens=draft_tokens, **options)
    return Counter(answer.token_ids[:length] for answer in answers)


def fit(
    model: Model, asked: dict[str, Any], length: int = 3, runs: int = 200, draft_tokens: int = 0, **options: Any
) -> float:
    """Chance of counts as far from the target's law as those that the model gives."""
    counts = counted(model, asked, length, runs, draft_tokens, **options)
    # An answer that an end token ended too early has no chance.
    return p_value(counts, expected_law(asked, length)) if {*map(len, counts)} == {length} else 0.0


def said(model: Model, prompt: Sequence[int], limit: int, draft_tokens: int, **options: Any) -> Finished:
    """One answer that no end token ends, unless the options say otherwise."""
    options = {"ignore_eos": not options.get("min_new_tokens"), **options}
    return model.complete(prompt_ids=list(prompt), max_new_tokens=limit, draft_tokens=draft_tokens, **options)
