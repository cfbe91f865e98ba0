"""Which field of a body a refusal is about, for `param` of an error: found in the sentence, whose subject it is."""

from __future__ import annotations

import re
from collections.abc import Iterable

from mtp_runtime.constraints.options import FORMS
from mtp_serving.openai.bodies import REFUSED, ChatBody, CommonBody, CompletionBody

_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "prompt_ids": "prompt",
    "time limit": "timeout",
}
"""What the runtime calls a field -> its name here, where they differ; forms of the answer stand in other fields."""
_VERBS = "is|are|has|have|was|allows|looks|names|masks|does|goes"


def param_of(message: str, body: CommonBody | None = None) -> str | None:
    """The one field that a sentence says something of; None if there is none, or are several.

    Args:
        message: of a refusal of the runtime or of this server.
        body: what was refused; None if it could not be read.
    """
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields} - {"model"}  # A word of many sentences.
    named = "|".join(sorted({*fields, *REFUSED, *_NAMES, *FORMS}, key=len, reverse=True))
    subjects = [
        *re.findall(rf"^({named})\b", message),
        *re.findall(rf"\b({named})(?=,? (?:which )?(?:{_VERBS})\b)", message),
        *re.findall(rf"\b({named})(?= = )", message),
        *re.findall(rf"\bwith ({named})\b", message),
        *re.findall(r"\brefused the (messages)\b", message),
        *(name for pair in re.findall(rf"\b({named}) and ({named})\b", message) for name in pair),
    ]
    found = {_name(subject, body) for subject in subjects}
    return found.pop() if len(found) == 1 else None


def _name(subject: str, body: CommonBody | None) -> str | None:
    name = _NAMES.get(subject, subject)
    if name == "prompt" and isinstance(body, ChatBody):
        return "messages"
    return _place_of_form(body) if name in FORMS else name


def _place_of_form(body: CommonBody | None) -> str | None:
    if body is None:
        return None
    given: Iterable[str] = ("structured_outputs", "response_format", "tools")
    return next((name for name in given if getattr(body, name, None)), None)
