"""What a benchmark compares: plain decoding, and every K with every chosen acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import click

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import RequestError
from mtp_runtime.request import AUTO, DraftTokens

Value = TypeVar("Value")


@dataclass(frozen=True)
class Case:
    """One way to decode.

    Attributes:
        draft_tokens: K; 0 is plain decoding, `auto` lets the policy choose.
        acceptance: share of right tokens among the drafts of every position that is reached; None leaves the
            drafts of the head as they are.
    """

    draft_tokens: DraftTokens
    acceptance: float | None = None

    def most_draft_tokens(self, manifest: Manifest) -> int:
        """The largest K that may come."""
        return manifest.limits.max_draft_tokens if self.draft_tokens == AUTO else self.draft_tokens


PLAIN = Case(0)
"""The baseline of every benchmark."""


def cases_of(widths: Sequence[DraftTokens], acceptances: Sequence[float]) -> list[Case]:
    """Plain decoding first, whether or not `widths` has 0, then by acceptance and K."""
    rates: Sequence[float | None] = acceptances or [None]
    return [PLAIN, *(Case(width, rate) for rate in rates for width in widths if width)]


def widths_from(text: str) -> list[DraftTokens]:
    """Values of K, and `auto`, from a list with commas.

    Raises:
        UsageError: anything else, a value below 0, or one that is named twice.
    """
    expected = "whole numbers from 0 on, or auto,"
    return _list(text, "--draft-tokens", _width, expected, lambda value: value == AUTO or int(value) >= 0)


def _width(text: str) -> DraftTokens:
    return AUTO if text.strip() == AUTO else int(text)


def acceptances_from(text: str | None) -> list[float]:
    """Shares from a list with commas; none if the option was left out.

    Raises:
        UsageError: anything else, a value outside 0 to 1, or one that is named twice.
    """
    if text is None:
        return []
    return _list(text, "--force-accept", float, "shares from 0 to 1", lambda value: 0 <= value <= 1)


def _list(
    text: str, option: str, kind: Callable[[str], Value], expected: str, allowed: Callable[[Value], bool]
) -> list[Value]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise click.UsageError(f"{option} takes {expected} with commas, found {text!r}.") from error
    for value in values:
        if not allowed(value):
            raise click.UsageError(f"{option} takes {expected}, found {value}.")
        if values.count(value) > 1:
            raise click.UsageError(f"{option} names {value} twice; name it once.")
    return values


def require_served(cases: Sequence[Case], longest_prompt: int, new_tokens: int, manifest: Manifest) -> None:
    """Refuse what the bundle cannot do, before its engine is opened.

    Raises:
        RequestError: no head, a K beyond the bundle, or more tokens than its context holds.
    """
    limits, most = manifest.limits, max(case.most_draft_tokens(manifest) for case in cases)
    asked = AUTO if any(case.draft_tokens == AUTO for case in cases) else most
    if asked and manifest.model.mtp is None:
        raise RequestError(
            f"--draft-tokens asks for {asked}, but this bundle was built without an MTP head; use --draft-tokens 0, or "
            "build it from a checkpoint that has one."
        )
    if most > limits.max_draft_tokens:
        raise RequestError(
            f"--draft-tokens asks for {most}, this bundle was built for 0 to {limits.max_draft_tokens}. Choose within, "
            "or build it again with --draft-tokens."
        )
    if longest_prompt + new_tokens > limits.max_model_len:
        raise RequestError(
            f"a prompt of {longest_prompt} tokens and {new_tokens} new ones are {longest_prompt + new_tokens}, and "
            f"this bundle holds {limits.max_model_len}. Ask for fewer, or build it with a larger --max-model-len."
        )
