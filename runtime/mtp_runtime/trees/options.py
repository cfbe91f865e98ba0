"""What a request may ask of a tree draft."""

from __future__ import annotations

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import RequestError
from mtp_runtime.drafters.registry import head_kind
from mtp_runtime.request import DraftTokens, Request
from mtp_runtime.sampling.acceptors import COUPLED
from mtp_runtime.trees.branching import BRANCHES


def choose_branches(request: Request, drafter: str, draft_tokens: DraftTokens, manifest: Manifest) -> int:
    """How many branches a draft has, where drafter and K are settled.

    Raises:
        RequestError: names what does not go with branches, and what to do.
    """
    asked = request.draft_branches
    if asked == 0:
        return 0
    if not 0 <= asked <= BRANCHES:
        raise RequestError(f"draft_branches is {asked}, expected 0 to {BRANCHES}.")
    named, head = f"draft_branches is {asked}, but", manifest.model.mtp
    if head is None:
        raise RequestError(f"{named} this bundle was built without an MTP head, which branches come from; use 0.")
    if drafter != head_kind(manifest.model):
        raise RequestError(
            f"{named} the drafter is {drafter!r}, and only the bundle's own head drafts several ways; use 0, or the "
            f"drafter {head_kind(manifest.model)!r}."
        )
    if head.has_table:
        raise RequestError(
            f"{named} this bundle's head looks its ids up in a table, so its second best token stays inside; use 0."
        )
    if isinstance(draft_tokens, str):
        raise RequestError(
            f"{named} draft_tokens is {draft_tokens!r}, which knows no costs of branches; give a number, or use 0."
        )
    if draft_tokens < asked:
        raise RequestError(
            f"{named} draft_tokens is {draft_tokens}, and every branch leaves the draft at a place of its own; use at "
            f"most {draft_tokens} of them, or more draft tokens."
        )
    if request.acceptor != COUPLED:
        raise RequestError(
            f"{named} the acceptor is {request.acceptor!r}, which judges each path in its own way; use 0, "
            f"or {COUPLED!r}."
        )
    if request.verify != "rows":
        raise RequestError(
            f"{named} verify is {request.verify!r}, which runs one row at a time, and branches run "
            "together; use 0, or 'rows'."
        )
    if manifest.limits.max_batch_size <= asked:
        raise RequestError(
            f"{named} this bundle runs {manifest.limits.max_batch_size} sequences together, and every branch is "
            f"one more; build it again with --max-batch-size {asked + 1}."
        )
    return asked
