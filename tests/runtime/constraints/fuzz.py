"""What must hold of answers under a schema, as a list of what does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from mtp_engines.errors import MtpError
from mtp_runtime import Finished, Model
from tests.runtime.constraints.schemas import schema

DEPTHS = range(5)
LIMIT = 56
PROMPT = "def settings():\n    return "
# Besides the bundle's own head at every K.
GREEDY = [
    {"drafter": "ngram", "draft_tokens": 4},
    {"drafter": "mtp+ngram", "draft_tokens": 3},
]


class Seen:
    """What the answers of one fuzz covered."""

    def __init__(self) -> None:
        self.answers = self.complete = 0
        self.emitted: Counter[int] = Counter()
        """How many cycles with four own drafts emitted so many tokens."""


def faults(model: Model, seeds: Iterable[int], seen: Seen | None = None) -> list[str]:
    """Every answer that is wrong: not valid though complete, or not that of plain decoding, or an error."""
    found: list[str] = []
    seen = seen or Seen()
    for seed in seeds:
        asked, form = schema(seed), f"schema {seed}"
        plain: tuple[int, ...] | None = None
        for options in [*({"drafter": None, "draft_tokens": depth} for depth in DEPTHS), *GREEDY]:
            said = _answer(model, asked, found, f"{form} {options}", seen, **options)
            if said is None:
                continue
            if plain is None:
                plain = said.token_ids
            if said.token_ids != plain:
                found.append(f"{form} {options}: other tokens")
            if options == {"drafter": None, "draft_tokens": 4}:
                seen.emitted += Counter(said.stats.emitted_histogram)
        _answer(model, asked, found, f"{form} drawn", seen, draft_tokens=3, temperature=0.9, seed=seed)
    return found


def _answer(
    model: Model, asked: dict[str, Any], found: list[str], name: str, seen: Seen, **options: Any
) -> Finished | None:
    try:
        said = model.complete(prompt=PROMPT, max_new_tokens=LIMIT, json_schema=asked, **options)
    except MtpError as error:
        found.append(f"{name}: {error}")
        return None
    seen.answers += 1
    if said.constraint == "complete":
        seen.complete += 1
        try:
            Draft202012Validator(asked).validate(json.loads(said.text))
        except (ValueError, ValidationError) as error:
            found.append(f"{name}: {said.text!r} is not valid: {str(error).splitlines()[0]}")
    elif said.finish_reason != "length":
        found.append(f"{name}: {said.text!r} ended by {said.finish_reason} before it was complete")
    return said
