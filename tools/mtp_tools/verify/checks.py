"""The checks of a verification, in order; each yields a line and whether it held."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtp_runtime.api import Model
from mtp_tools.verify.forced import ForcedDrafter, Pattern
from mtp_tools.verify.runs import CommitsEverything, KeepsOneRowTooMany, Outcome, Plain, Wrap, run_against, run_plain
from mtp_tools.verify.settle import Precision, Rounding, settle

_TEXTS = (
    "The function returns a list of",
    "To install the package, run the following command and then",
)
_SEED = 0


@dataclass(frozen=True)
class Line:
    """One result: what was checked and whether it held.

    Attributes:
        near_ties: tokens that differ and were settled as near ties.
        is_rounded: something differs, and all of it is rounding.
    """

    text: str
    holds: bool
    near_ties: int = 0
    is_rounded: bool = False


def checks(model: Model, new_tokens: int, long_tokens: int, precision: Precision = "fp32") -> Iterator[Line]:
    """Run every check on a loaded bundle.

    Rows together are compared bit by bit with plain decoding on an engine that promises `exact`; on one that is
    `near-tie` differences that are rounding hold. Row by row every bit is compared on both.

    Args:
        new_tokens: tokens of each compared run.
        long_tokens: tokens of the one long generation.
        precision: the type that the engine computes in.
    """
    judge = _Judge(model, Rounding(precision, model.engine.spec.hidden_size))
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
            yield from _natural(judge, plain, most, name)
        yield from _forced(judge, plain, most, name, reached)
        yield from _row_by_row(judge, plain, most, name)
    yield _coverage(reached, most)
    shortest = min(prompts, key=len)
    yield _control(judge, shortest, min(new_tokens, room - len(shortest)), most)
    yield from _long(judge, prompts[0], min(long_tokens, room - len(prompts[0])), most)


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


@dataclass(frozen=True)
class _Judge:
    """Makes a line of what became of a run."""

    model: Model
    rounding: Rounding

    def line(self, plain: Plain, outcome: Outcome, text: str, wrap: Wrap | None = None) -> Line:
        """Of a run with rows together; `wrap` is its fault, for controls."""
        if outcome.holds:
            return Line(text, True)
        settlement = settle(self.model, plain, outcome, self.rounding, wrap)
        line = self.bits(outcome, text)
        if self.model.engine.numerics == "exact":
            broken = ", which breaks the promise `exact`" if settlement.is_rounding else ""
            return Line(f"{line.text}; {settlement}{broken}", False)
        if settlement.is_rounding:
            return Line(f"{text}; {settlement}", True, len(settlement.flips), is_rounded=True)
        return Line(f"{line.text}; {settlement}", False)

    def bits(self, outcome: Outcome, text: str) -> Line:
        """Of a run that has to be plain decoding bit by bit on every engine."""
        if outcome.first_token is not None:
            text += f"; token {outcome.first_token} differs"
        if outcome.first_state is not None:
            length, name = outcome.first_state
            text += f"; state {name} differs at {length} committed tokens"
        if outcome.first_hidden is not None:
            text += f"; the hidden state of position {outcome.first_hidden} differs"
        return Line(text, outcome.holds)


def _natural(judge: _Judge, plain: Plain, most: int, name: str) -> Iterator[Line]:
    for draft_tokens in range(1, most + 1):
        outcome = run_against(judge.model, plain, draft_tokens)
        rate = f"{outcome.stats.accepted} of {outcome.stats.drafted} drafts accepted"
        yield judge.line(plain, outcome, f"{name}, K = {draft_tokens}, own head: {rate}")


def _forced(judge: _Judge, plain: Plain, most: int, name: str, reached: set[int]) -> Iterator[Line]:
    for draft_tokens in range(1, most + 1):
        for label, pattern in _patterns(draft_tokens):
            outcome = _run_forced(judge.model, plain, draft_tokens, pattern)
            reached |= {length - 1 for length in outcome.stats.emitted_histogram}
            yield judge.line(plain, outcome, f"{name}, K = {draft_tokens}, {label}")


def _row_by_row(judge: _Judge, plain: Plain, most: int, name: str) -> Iterator[Line]:
    for draft_tokens in range(1, most + 1):
        size, pattern = judge.model.manifest.model.vocab_size, _at_random(random.Random(_SEED))
        drafter = ForcedDrafter(len(plain.prompt), plain.ids, size, pattern)
        outcome = run_against(judge.model, plain, draft_tokens, drafter, verify="step")
        yield judge.bits(outcome, f"{name}, K = {draft_tokens}, verify step: forced: random")


def _patterns(draft_tokens: int) -> Iterator[tuple[str, Pattern]]:
    for count in range(draft_tokens + 1):
        label = "all rejected" if count == 0 else "all accepted" if count == draft_tokens else f"{count} accepted"
        yield f"forced: {label}", lambda cycle, k, count=count: min(count, k)  # type: ignore[misc]
    yield "forced: random", _at_random(random.Random(_SEED))


def _run_forced(model: Model, plain: Plain, draft_tokens: int, pattern: Pattern) -> Outcome:
    drafter = ForcedDrafter(len(plain.prompt), plain.ids, model.manifest.model.vocab_size, pattern)
    return run_against(model, plain, draft_tokens, drafter)


def _at_random(generator: random.Random) -> Pattern:
    return lambda cycle, k: generator.randint(0, k)


def _coverage(reached: set[int], most: int) -> Line:
    missed = sorted(set(range(most + 1)) - reached)
    if missed:
        return Line(f"accepted counts never reached: {missed}; ask for more --new-tokens", False)
    return Line(f"every accepted count from 0 to {most} was reached", True)


def _control(judge: _Judge, prompt: list[int], new_tokens: int, most: int) -> Line:
    """With rejected rows left in the state, the comparison must fail; otherwise it proves nothing."""
    model = judge.model
    plain = run_plain(model, prompt, new_tokens)
    drafter = ForcedDrafter(len(prompt), plain.ids, model.manifest.model.vocab_size, lambda cycle, k: 0)
    fault = CommitsEverything if any(model.engine.spec.delta_layers()) else KeepsOneRowTooMany
    outcome = run_against(model, plain, most, drafter, fault)
    noticed = not judge.line(plain, outcome, "", fault).holds
    return Line("control: rejected rows left in the state are noticed", noticed)


def _long(judge: _Judge, prompt: list[int], new_tokens: int, most: int) -> Iterator[Line]:
    model = judge.model
    plain = run_plain(model, prompt, new_tokens, with_states=False)
    name = f"long generation of {len(plain.ids)} tokens, K = {min(3, most)}"
    outcome = _run_forced(model, plain, min(3, most), _at_random(random.Random(_SEED)))
    yield judge.line(plain, outcome, f"{name}, forced: random")
    if model.manifest.model.mtp is not None:
        yield judge.line(plain, run_against(model, plain, min(3, most)), f"{name}, own head")
