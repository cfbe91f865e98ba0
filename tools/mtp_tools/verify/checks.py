"""The checks of a verification, in order; each yields a line and whether it held."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtp_runtime.api import Model
from mtp_tools.verify.forced import ForcedDrafter, Pattern
from mtp_tools.verify.runs import CommitsEverything, KeepsOneRowTooMany, Outcome, Plain, run_against, run_plain, top_two

_TEXTS = (
    "The function returns a list of",
    "To install the package, run the following command and then",
)
_SEED = 0


@dataclass(frozen=True)
class Line:
    """One result: what was checked and whether it held."""

    text: str
    holds: bool


def checks(model: Model, new_tokens: int, long_tokens: int) -> Iterator[Line]:
    """Run every check on a loaded bundle.

    Args:
        new_tokens: tokens of each compared run.
        long_tokens: tokens of the one long generation.
    """
    most = model.manifest.limits.max_draft_tokens
    room = model.manifest.limits.max_model_len
    prompts = [prompt for prompt in _prompts(model) if len(prompt) + 2 <= room]
    if all(len(prompt) <= model.engine.limits.prefill_chunk for prompt in prompts):
        yield Line(f"prompts of more than one prefill chunk do not fit a context of {room} tokens", True)
    reached: set[int] = set()
    for prompt in prompts:
        plain = run_plain(model, prompt, min(new_tokens, room - len(prompt)))
        name = f"prompt of {len(prompt)} tokens"
        if model.manifest.model.mtp is not None:
            yield from _natural(model, plain, most, name)
        yield from _forced(model, plain, most, name, reached)
    yield _coverage(reached, most)
    shortest = min(prompts, key=len)
    yield _control(model, shortest, min(new_tokens, room - len(shortest)), most)
    yield from _long(model, prompts[0], min(long_tokens, room - len(prompts[0])), most)


def _prompts(model: Model) -> Iterator[list[int]]:
    """Texts where the bundle can read them, random ids, a single token, and more than one prefill chunk."""
    random_ids = np.random.default_rng(_SEED).integers(0, model.manifest.model.vocab_size, 4096).tolist()
    tokenizer = model.prompts.tokenizer
    if tokenizer is not None:
        for text in _TEXTS:
            if ids := tokenizer.encode(text).ids:
                yield ids
    yield random_ids[:17]
    yield random_ids[:1]
    yield random_ids[: 2 * model.engine.limits.prefill_chunk + 3]


def _natural(model: Model, plain: Plain, most: int, name: str) -> Iterator[Line]:
    for draft_tokens in range(1, most + 1):
        outcome = run_against(model, plain, draft_tokens)
        rate = f"{outcome.stats.accepted} of {outcome.stats.drafted} drafts accepted"
        yield _line(model, plain, outcome, f"{name}, K = {draft_tokens}, own head: {rate}")


def _forced(model: Model, plain: Plain, most: int, name: str, reached: set[int]) -> Iterator[Line]:
    for draft_tokens in range(1, most + 1):
        for label, pattern in _patterns(draft_tokens):
            outcome = _run_forced(model, plain, draft_tokens, pattern)
            reached |= {length - 1 for length in outcome.stats.emitted_histogram}
            yield _line(model, plain, outcome, f"{name}, K = {draft_tokens}, {label}")


def _patterns(draft_tokens: int) -> Iterator[tuple[str, Pattern]]:
    for count in range(draft_tokens + 1):
        label = "all rejected" if count == 0 else "all accepted" if count == draft_tokens else f"{count} accepted"
        yield f"forced: {label}", lambda cycle, k, count=count: min(count, k)  # type: ignore[misc]
    generator = random.Random(_SEED)
    yield "forced: random", lambda cycle, k: generator.randint(0, k)


def _run_forced(model: Model, plain: Plain, draft_tokens: int, pattern: Pattern) -> Outcome:
    drafter = ForcedDrafter(len(plain.prompt), plain.ids, model.manifest.model.vocab_size, pattern)
    return run_against(model, plain, draft_tokens, drafter)


def _coverage(reached: set[int], most: int) -> Line:
    missed = sorted(set(range(most + 1)) - reached)
    if missed:
        return Line(f"accepted counts never reached: {missed}; ask for more --new-tokens", False)
    return Line(f"every accepted count from 0 to {most} was reached", True)


def _control(model: Model, prompt: list[int], new_tokens: int, most: int) -> Line:
    """With rejected rows left in the state, the comparison must fail; otherwise it proves nothing."""
    plain = run_plain(model, prompt, new_tokens)
    drafter = ForcedDrafter(len(prompt), plain.ids, model.manifest.model.vocab_size, lambda cycle, k: 0)
    fault = CommitsEverything if any(model.engine.spec.delta_layers()) else KeepsOneRowTooMany
    outcome = run_against(model, plain, most, drafter, fault)
    return Line("control: rejected rows left in the state are noticed", not outcome.holds)


def _long(model: Model, prompt: list[int], new_tokens: int, most: int) -> Iterator[Line]:
    plain = run_plain(model, prompt, new_tokens, with_states=False)
    generator = random.Random(_SEED)
    outcome = _run_forced(model, plain, min(3, most), lambda cycle, k: generator.randint(0, k))
    yield _line(
        model, plain, outcome, f"long generation of {len(plain.ids)} tokens, K = {min(3, most)}, forced: random"
    )
    if model.manifest.model.mtp is not None:
        outcome = run_against(model, plain, min(3, most))
        yield _line(model, plain, outcome, f"long generation of {len(plain.ids)} tokens, K = {min(3, most)}, own head")


def _line(model: Model, plain: Plain, outcome: Outcome, text: str) -> Line:
    if outcome.first_token is not None:
        first, second, gap = top_two(model, plain, outcome.first_token)
        text += (
            f"; token {outcome.first_token} differs, where plain decoding's best two ids {first} and {second} are "
            f"{gap:.2e} apart"
        )
    if outcome.first_state is not None:
        length, name = outcome.first_state
        text += f"; state {name} differs at {length} committed tokens"
    if outcome.first_hidden is not None:
        text += f"; the hidden state of position {outcome.first_hidden} differs"
    return Line(text, outcome.holds)
