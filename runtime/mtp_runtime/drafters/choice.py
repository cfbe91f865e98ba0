"""Which drafter serves a request: what is taken when none is named, and what is refused."""

from __future__ import annotations

from mtp_engines.contracts.model import ModelSpec
from mtp_engines.errors import RequestError
from mtp_runtime.drafters.ngram import LONGEST_MATCH, MAX_MATCH, MIN_MATCH
from mtp_runtime.drafters.registry import TABLE, WITH_LOOKUP, base_of, head_kind, uses_lookup


def choose_drafter(asked: str | None, model: ModelSpec, has_draft_model: bool) -> str:
    """The name of the drafter: the one that was asked for, else a draft model, the bundle's head or none.

    Raises:
        RequestError: it needs a head or a draft model that is not there; says what there is.
    """
    head = head_kind(model)
    if asked is None:
        return "draft-model" if has_draft_model else head or "none"
    base = base_of(asked)
    needs = TABLE[base].needs
    if needs == "head" and base != head:
        found = "was built without an MTP head" if head is None else f"has a head of the kind {head!r}"
        raise RequestError(f"drafter is {asked!r}, but this bundle {found}; {_instead(asked, head, has_draft_model)}.")
    if needs == "draft model" and not has_draft_model:
        raise RequestError(
            f"drafter is {asked!r}, but no draft model was loaded; give its bundle with --draft-model, or "
            f"{_instead(asked, head, has_draft_model)}."
        )
    return asked


def _instead(asked: str, head: str | None, has_draft_model: bool) -> str:
    """What would be served in the place of what was asked for, with a lookup if that had one."""
    suffix = WITH_LOOKUP if asked.endswith(WITH_LOOKUP) else ""
    bases = [name for name in (head, "draft-model" if has_draft_model else None) if name]
    names = [repr(name) for name in (*(base + suffix for base in bases), "ngram")]
    return f"use {', '.join(names)} or 'none'"


def choose_ngram(shortest: int | None, longest: int | None, drafter: str) -> tuple[int, int]:
    """Shortest and longest match of a lookup.

    Raises:
        RequestError: one was given though the drafter looks nothing up, or they are out of range.
    """
    for name, value in (("ngram_min", shortest), ("ngram_max", longest)):
        if value is not None and not uses_lookup(drafter):
            other = "'ngram'" if drafter == "none" else f"'ngram' or {drafter + WITH_LOOKUP!r}"
            raise RequestError(
                f"{name} is {value}, but the drafter is {drafter!r}, which looks up no n-grams; leave it out, or use "
                f"the drafter {other}."
            )
    least = MIN_MATCH if shortest is None else shortest
    most = MAX_MATCH if longest is None else longest
    if not 1 <= least <= most <= LONGEST_MATCH:
        raise RequestError(
            f"ngram_min is {least} and ngram_max is {most}, expected 1 <= ngram_min <= ngram_max <= {LONGEST_MATCH}. "
            "Correct or give both."
        )
    return least, most
