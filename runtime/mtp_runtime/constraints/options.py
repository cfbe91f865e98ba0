"""What a request may ask of the form of its answer, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_engines.errors import RequestError

FORMS = ("json_schema", "json_object", "regex", "grammar", "choice")
"""Fields of a request that say what the answer must look like."""
AFTER = "constraint_after"
NAMES = (*FORMS, AFTER)


@dataclass(frozen=True)
class Asked:
    """One form that an answer must have.

    Attributes:
        name: which of `FORMS`.
        value: what was given for it.
        after: a text of the answer behind which the form begins; empty where it begins at once.
    """

    name: str
    value: Any
    after: str = ""


def asked_of(fields: Mapping[str, Any], min_new_tokens: int = 0) -> Asked | None:
    """What a request asks for; None if it asks for nothing.

    Args:
        fields: those of `NAMES`; None, and for `json_object` False, where they were left out.
        min_new_tokens: that of the request, which cannot go with a constraint.

    Raises:
        RequestError: several forms, options that contradict each other, or an empty value; names them.
    """
    given = [name for name in FORMS if fields[name] is not None and not (name == "json_object" and not fields[name])]
    after = fields[AFTER]
    if len(given) > 1:
        raise RequestError(
            f"a request has {' and '.join(given)}, but an answer has one form; leave all but one of them out, or put "
            "them together in one grammar."
        )
    if not given:
        if after is not None:
            raise RequestError(
                f"{AFTER} is {after!r}, but nothing is to begin there; add one of {', '.join(FORMS)}, or leave it out."
            )
        return None
    if after == "":
        raise RequestError(f"{AFTER} is an empty text; leave it out, and {given[0]} holds from the first token.")
    if given == ["choice"] and not fields["choice"]:
        raise RequestError("choice is an empty list, which leaves no answer; give at least one text.")
    if min_new_tokens:
        raise RequestError(
            f"min_new_tokens is {min_new_tokens}, but with {given[0]} the answer ends where its form is complete; "
            "leave one of the two out."
        )
    return Asked(given[0], fields[given[0]], after or "")
