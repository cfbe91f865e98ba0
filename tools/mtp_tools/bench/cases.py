"""What a benchmark compares: plain decoding, and every K with every chosen acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import click

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import RequestError
from mtp_runtime.request import AUTO, DraftTokens
from mtp_runtime.trees.branching import BRANCHES

Value = TypeVar("Value")


@dataclass(frozen=True)
class Case:
    """One way to decode.

    Attributes:
        draft_tokens: K; 0 is plain decoding, `auto` lets the policy choose.
        acceptance: share of right tokens among the drafts of every position that is reached; None leaves the
            drafts of the head as they are.
        draft_branches: further paths of a draft.
    """

    draft_tokens: DraftTokens
    acceptance: float | None = None
    draft_branches: int = 0

    @property
    def verified_rows(self) -> int | None:
        """Rows of a verify, over all paths; None where K is chosen."""
        return None if self.draft_tokens == AUTO else (1 + self.draft_branches) * (1 + self.draft_tokens)

    def most_draft_tokens(self, manifest: Manifest) -> int:
        """The largest K that may come."""
        return manifest.limits.max_draft_tokens if self.draft_tokens == AUTO else self.draft_tokens


PLAIN = Case(0)
"""The baseline of every benchmark."""


def cases_of(widths: Sequence[DraftTokens], acceptances: Sequence[float], branches: Sequence[int] = (0,)) -> list[Case]:
    """Plain decoding first, whether or not `widths` has 0, then by acceptance, branches and K.

    Branches leave out what they do not go with: `auto`, and a K below their number.
    """
    rates: Sequence[float | None] = acceptances or [None]
    found = [Case(width, rate, count) for rate in rates for count in branches for width in widths if width]
    return [PLAIN, *(case for case in found if not case.draft_branches or _holds_branches(case))]


def _holds_branches(case: Case) -> bool:
    return case.draft_tokens != AUTO and case.draft_branches <= case.draft_tokens


def widths_from(text: str) -> list[DraftTokens]:
    """Values of K, and `auto`, from a list with commas.

    Raises:
        UsageError: anything else, a value below 0, or one that is named twice.
    """
    expected = "whole numbers from 0 on, or auto,"
    return _list(text, "--draft-tokens", _width, expected, lambda value: value == AUTO or int(value) >= 0)


def _width(text: str) -> DraftTokens:
    return AUTO if text.strip() == AUTO else int(text)


def branches_from(text: str, acceptances: Sequence[float]) -> list[int]:
    """Numbers of branches from a list with commas.

    Raises:
        UsageError: anything else, a value that no draft has, one that is named twice, or branches of forced drafts.
    """
    expected = f"whole numbers from 0 to {BRANCHES}"
    found = _list(text, "--draft-branches", int, expected, lambda value: 0 <= value <= BRANCHES)
    if any(found) and acceptances:
        raise click.UsageError("--force-accept forces one draft, and --draft-branches asks for several; leave one out.")
    return found


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
    paths = 1 + max(case.draft_branches for case in cases)
    if paths > limits.max_batch_size:
        raise RequestError(
            f"--draft-branches asks for {paths - 1}, and this bundle runs {limits.max_batch_size} sequences together, "
            f"of which every branch is one more; build it again with --max-batch-size {paths}."
        )
    if longest_prompt + new_tokens > limits.max_model_len:
        raise RequestError(
            f"a prompt of {longest_prompt} tokens and {new_tokens} new ones are {longest_prompt + new_tokens}, and "
            f"this bundle holds {limits.max_model_len}. Ask for fewer, or build it with a larger --max-model-len."
        )
