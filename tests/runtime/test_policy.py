"""Policies of K: `auto` against made-up drafters of known acceptance, in a time that is computed, and in the loop."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.backends.options import EngineOptions
from mtp_engines.contracts.manifest import DraftAgreement
from mtp_engines.costs import CycleCosts
from mtp_engines.engine import Ids, Verified
from mtp_engines.errors import RequestError
from mtp_runtime import Model, auto, load
from mtp_runtime.auto import expected_acceptance, with_draft_model
from mtp_runtime.cli import requests_from_file
from mtp_runtime.policy import Acceptance, AutoPolicy, DraftPolicy, FixedPolicy, Tuning
from tests.fixtures.checkpoints import markov_checkpoint, partial_checkpoint
from tests.runtime.conftest import Models
from tests.runtime.parts import Delegate, counts, forced, plain, play
from tests.support import build_bundle, command_refused, generate, ids_of, load_model, refused, run_command

PROMPT = [5, 6, 20]
TOKENS = 60
# A row more costs a CPU's products much, and a GPU that waits for its memory little.
STEEP = CycleCosts(verify=(1.0, 1.2, 1.75, 2.1), draft=(0.1, 0.17, 0.3), catch_up=0.01, commit=0.08)
FLAT = CycleCosts(
    verify=(1.0, 1.03, 1.05, 1.08, 1.1, 1.12, 1.15, 1.17),
    draft=(0.08, 0.13, 0.19, 0.24, 0.3, 0.35, 0.4),
    catch_up=0.001,
    commit=0.0,
)
TABLES = pytest.mark.parametrize("costs", [STEEP, FLAT], ids=["steep", "flat"])
NEVER_TRIES = Tuning(allowances=(0.0,))

Accepts = Callable[[int], float]
"""Emitted tokens so far -> share of every position that is accepted, given those before it."""


def always(share: float) -> Accepts:
    return lambda emitted: share


def then(first: float, second: float, at: int) -> Accepts:
    return lambda emitted: first if emitted < at else second


def chosen_by(policy: DraftPolicy, accepts: Accepts, limit: int, seed: int = 0) -> list[tuple[int, int]]:
    """K and accepted drafts of every cycle until `limit` tokens are out."""
    generator, emitted = random.Random(seed), 0
    cycles: list[tuple[int, int]] = []
    while emitted < limit:
        wanted, right = policy.choose(len(cycles)), 0
        while right < wanted and generator.random() < accepts(emitted):
            right += 1
        policy.observe(wanted, right)
        emitted += right + 1
        cycles.append((wanted, right))
    return cycles


def seconds_of(cycles: Sequence[tuple[int, int]], costs: CycleCosts, waiting: int = 0) -> float:
    """What the cycles cost by the table, written apart from the policy's own sum."""
    total = 0.0
    for wanted, right in cycles:
        total += costs.verify[wanted]
        if wanted:
            total += costs.draft[wanted - 1] + max(waiting - 2, 0) * costs.catch_up
        if right < wanted:
            total += costs.commit
        waiting = right + 1 if wanted else waiting + 1
    return total


def speed(make: Callable[[], DraftPolicy], costs: CycleCosts, accepts: Accepts, limit: int, waiting: int = 0) -> float:
    """Tokens a second over several seeds."""
    runs = [chosen_by(make(), accepts, limit, seed) for seed in range(8)]
    emitted = sum(right + 1 for cycles in runs for _, right in cycles)
    return emitted / sum(seconds_of(cycles, costs, waiting) for cycles in runs)


def against_fixed(
    make: Callable[[], DraftPolicy], costs: CycleCosts, accepts: Accepts, limit: int, waiting: int = 0
) -> float:
    """Speed over that of the best fixed K."""

    def fixed(width: int) -> float:
        return speed(lambda: FixedPolicy(width), costs, accepts, limit, waiting if width else 0)

    return speed(make, costs, accepts, limit, waiting) / max(fixed(k) for k in range(len(costs.verify)))


# Against the best fixed K


@TABLES
@pytest.mark.parametrize(("share", "least"), [(0.0, 0.97), (0.1, 0.965), (0.3, 0.96), (0.7, 0.96), (1.0, 0.97)])
def test_auto_is_close_to_the_best_fixed_k(costs: CycleCosts, share: float, least: float) -> None:
    """256 tokens behind a prompt of 64."""

    def found(make: Callable[[], DraftPolicy]) -> float:
        return against_fixed(make, costs, always(share), 256, 64)

    assert found(lambda: AutoPolicy(costs, 64)) > least
    wrong = len(costs.draft) if share < 0.5 else 0
    assert found(lambda: FixedPolicy(wrong)) < least, "control: a K that does not fit is further away"


@TABLES
def test_drafts_that_are_never_right_cost_less_than_two_percent(costs: CycleCosts) -> None:
    """Over a long answer: the first attempts, those that follow, and the rows that the head has to read for them."""
    long = 4000
    assert against_fixed(lambda: AutoPolicy(costs), costs, always(0.0), long) > 0.98
    eager = Tuning(allowances=(0.1,))
    assert against_fixed(lambda: AutoPolicy(costs, tuning=eager), costs, always(0.0), long) < 0.98, "control"


@TABLES
@pytest.mark.parametrize("share", [0.7, 1.0])
def test_auto_comes_back_when_drafts_become_right(costs: CycleCosts, share: float) -> None:
    accepts = then(0.0, share, 300)

    def later(tuning: Tuning | None) -> float:
        """Tokens a cycle in the second half of what comes after the change."""
        emitted, after = 0, []
        for _, right in chosen_by(AutoPolicy(costs, tuning=tuning), accepts, 700):
            emitted += right + 1
            if emitted > 500:
                after.append(right + 1)
        return sum(after) / len(after)

    fixed = chosen_by(FixedPolicy(1), always(share), 400)
    assert later(None) > 0.95 * (400 / len(fixed))
    assert later(NEVER_TRIES) == 1.0, "control: who never tries never comes back"


@TABLES
def test_auto_leaves_off_soon_when_drafts_become_wrong(costs: CycleCosts) -> None:
    cycles = chosen_by(AutoPolicy(costs), then(1.0, 0.0, 400), 500)
    assert len(cycles) > 100
    assert sum(1 for wanted, right in cycles if wanted and not right) <= 15
    slow = Tuning(surprise=0.0, memory=1.0)
    cycles = chosen_by(AutoPolicy(costs, tuning=slow), then(1.0, 0.0, 400), 500)
    assert sum(1 for wanted, right in cycles if wanted and not right) > 15, "control: old evidence holds on"


def test_costs_decide(tmp_path: Path) -> None:
    """The same drafts deserve a large K where rows are cheap and a small one where they are not."""
    free = CycleCosts(verify=(1.0,) * 4, draft=(0.0,) * 3, catch_up=0.0, commit=0.0)
    assert against_fixed(lambda: AutoPolicy(STEEP), STEEP, always(0.4), 1000) > 0.96
    assert against_fixed(lambda: AutoPolicy(free), STEEP, always(0.4), 1000) < 0.9, "control: a policy without costs"
    assert against_fixed(lambda: AutoPolicy(free), free, always(0.4), 1000) > 0.99


def test_a_bundle_for_no_drafts_has_none() -> None:
    cycles = chosen_by(AutoPolicy(CycleCosts((1.0,), (), 0.0, 0.0)), always(1.0), 20)
    assert {wanted for wanted, _ in cycles} == {0}


# What it learns from


def test_nothing_is_drawn() -> None:
    first, second, other = (chosen_by(AutoPolicy(FLAT), always(0.6), 300, seed) for seed in (1, 1, 2))
    assert first == second
    assert first != other, "control: other drafts, other choices"


def test_where_nothing_is_known_the_first_draft_is_one_token() -> None:
    """It shows as much of the first position as a longer one, and loses less if the head is never right."""
    unknown, promised = AutoPolicy(FLAT), AutoPolicy(FLAT, prior=0.6)
    assert unknown.choose(0) == 1
    assert promised.choose(0) > 1, "control: what a build has found is gone by at once"
    unknown.observe(1, 1)
    assert unknown.choose(1) > 1


def test_gaps_between_attempts_grow() -> None:
    cycles = chosen_by(AutoPolicy(STEEP), always(0.0), 600)
    tried = [number for number, (wanted, _) in enumerate(cycles) if wanted]
    gaps = [after - before for before, after in pairwise(tried) if after - before > 1]
    assert len(gaps) > 4
    assert gaps == sorted(gaps)
    assert gaps[0] < gaps[-1] < 100


def test_a_head_that_is_not_worth_the_prompt_never_reads_it() -> None:
    """The build found hardly a right draft, and the prompt is long: reading it is put off until it is affordable."""

    def first_attempt(prior: float | None, prompt: int) -> int:
        cycles = chosen_by(AutoPolicy(STEEP, prompt, prior), always(0.0), 2000)
        return next((number for number, (wanted, _) in enumerate(cycles) if wanted), len(cycles))

    assert first_attempt(0.05, 1000) > 400
    assert first_attempt(0.05, 0) < 100, "control: without a prompt an attempt is cheap"
    assert first_attempt(None, 1000) == 0, "control: a promising head reads it at once"


def test_a_position_is_expected_to_do_as_well_as_the_one_before_it() -> None:
    """A hump in the costs: K = 2 is no better than 1, K = 7 is the best of all, so one more at a time finds nothing."""
    hump = CycleCosts(verify=(1, 1.2, 1.9, 2.1, 2.3, 2.5, 2.7, 2.9), draft=(0.1,) * 7, catch_up=0.0, commit=0.0)
    cycles = chosen_by(AutoPolicy(hump), always(1.0), 300)
    assert {wanted for wanted, _ in cycles[20:]} == {7}


def test_what_a_drafter_does_not_propose_is_not_asked_for_again() -> None:
    """A head of two trained depths never has a third draft, however good the two are."""
    policy, asked = AutoPolicy(FLAT), []
    for number in range(200):
        asked.append(policy.choose(number))
        drafted = min(asked[-1], 2)
        policy.observe(drafted, drafted)
    assert asked[100:].count(2) > 80


def test_a_cycle_without_a_proposal_shows_nothing() -> None:
    policy = AutoPolicy(FLAT, prior=0.6)
    before = policy.choose(0)
    for number in range(1, 50):
        policy.observe(0, 0)
        assert policy.choose(number) >= before > 0, "a rejection would have made it less"
    for number in range(50, 60):
        policy.observe(before, 0)
        policy.choose(number)
    assert policy.choose(60) == 0, "control: rejected proposals show something"


def test_a_run_that_is_no_chance_puts_the_past_aside() -> None:
    steady, stubborn = Acceptance(Tuning()), Acceptance(Tuning(surprise=0.0))
    for kept in [True] * 30 + [False] * 3:
        for position in (steady, stubborn):
            position.age()
            position.add(kept, 0.6)
    assert steady.estimate(0.6) < 0.3 < 0.8 < stubborn.estimate(0.6)
    assert steady.estimate(0.6) < steady.estimate(0.6, hope=4.0) < 1


def test_what_the_build_measured_is_expected(partial: Model) -> None:
    def expected(drafted: int, accepted: int) -> float | None:
        from dataclasses import replace

        return expected_acceptance(replace(partial.manifest, draft_agreement=DraftAgreement(drafted, accepted)))

    assert expected(0, 0) is None
    found = [expected(47, accepted) for accepted in (0, 20, 47)]
    assert None not in found
    assert 0 < found[0] < 0.1 < found[1] < 0.5 < found[2] < 1  # type: ignore[operator]


def test_a_draft_model_costs_what_its_blocks_cost() -> None:
    """Its newest row, then blocks of 1, 2, ... drafts; beyond what was measured, the widest."""
    draft = CycleCosts(verify=(0.1, 0.2), draft=(9.0,), catch_up=9.0, commit=9.0)
    found = with_draft_model(FLAT, draft)
    assert found.draft[:4] == pytest.approx((0.1, 0.2, 0.4, 0.6))
    assert (found.catch_up, found.verify, found.commit) == (pytest.approx(0.1), FLAT.verify, FLAT.commit)


# In the loop


class Contrary(AutoPolicy):
    """Chooses badly on purpose: the most after a rejection, nothing after an accepted draft."""

    def __init__(self) -> None:
        super().__init__(FLAT)
        self._next = 0

    def choose(self, number: int) -> int:
        return self._next

    def observe(self, drafted: int, accepted: int) -> None:
        self._next = 0 if drafted and accepted == drafted else (self._next + 3) % 8


POLICIES: dict[str, Callable[[], DraftPolicy]] = {
    "steep": lambda: AutoPolicy(STEEP),
    "flat": lambda: AutoPolicy(FLAT),
    "contrary": Contrary,
}


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_no_policy_changes_a_token_or_a_state(partial: Model, hybrid: Models, make: Callable[[], DraftPolicy]) -> None:
    reference = plain(partial, PROMPT, TOKENS, states=True)
    run = play(partial, PROMPT, TOKENS, make(), states=True)
    assert run.ids == reference.ids
    assert all(run.states[length] == reference.states[length] for length in run.states)
    chosen = run.finished.stats.draft_tokens_chosen
    assert len(chosen) > 1, "K never changed"
    assert sum(chosen.values()) == run.finished.stats.cycles
    model = hybrid(seed=32)
    expected = plain(model, PROMPT, TOKENS)
    drafter = forced(expected, PROMPT, model.manifest.model.vocab_size, lambda cycle, k: (k - cycle // 6) % (k + 1))
    assert play(model, PROMPT, TOKENS, make(), drafter).ids == expected.ids


def test_control_a_policy_meets_a_plain_cycle_that_lost_its_row(hybrid: Models) -> None:
    class LosesPlainRows(Delegate):
        def verify(self, tokens: Ids, logit_rows: int) -> Verified:
            self._rows = tokens.shape[1]
            return super().verify(tokens, logit_rows)

        def commit(self, rows: Ids) -> None:
            self.inner.commit(np.zeros_like(rows) if self._rows == 1 else rows)
            self.inner.lengths += rows if self._rows == 1 else 0

    model = hybrid(seed=32)
    reference = plain(model, PROMPT, TOKENS)
    drafter = forced(reference, PROMPT, model.manifest.model.vocab_size, lambda cycle, k: 0 if cycle < 20 else k)
    assert play(model, PROMPT, TOKENS, AutoPolicy(FLAT), drafter, wrap=LosesPlainRows).ids != reference.ids


def test_the_loop_tells_the_policy_what_became_of_its_choice(partial: Model) -> None:
    class Remembers(FixedPolicy):
        def observe(self, drafted: int, accepted: int) -> None:
            seen.append((drafted, accepted))

    seen: list[tuple[int, int]] = []
    run = play(partial, PROMPT, TOKENS, Remembers(3))
    stats = run.finished.stats
    assert (sum(d for d, _ in seen), sum(a for _, a in seen)) == (stats.drafted, stats.accepted)
    assert [accepted for _, accepted in seen[:-1]] == run.accepted[:-1]
    assert 0 < stats.accepted < stats.drafted


# Requests


@pytest.mark.parametrize("drafter", [None, "mtp", "ngram", "mtp+ngram", "none"])
def test_a_request_for_auto_gives_the_ids_of_plain_decoding(partial: Model, drafter: str | None) -> None:
    done = partial.complete(prompt_ids=PROMPT, max_new_tokens=TOKENS, draft_tokens="auto", drafter=drafter)
    assert list(done.token_ids) == ids_of(partial, PROMPT, TOKENS)
    chosen = done.stats.as_dict()["draft_tokens_chosen"]
    assert sum(chosen.values()) == done.stats.cycles
    assert all(0 <= int(width) <= 8 for width in chosen)
    assert list(chosen) == sorted(chosen, key=int)


def test_a_request_for_auto_drafts_with_a_draft_model(tmp_path: Path) -> None:
    target, draft = (
        build_bundle(markov_checkpoint(tmp_path / f"c{n}"), tmp_path / f"b{n}", draft_tokens=4) for n in (1, 2)
    )
    model = load(target, threads=1, draft_model=draft)
    options: dict[str, Any] = {"prompt_ids": [5], "max_new_tokens": 30}
    done = model.complete(**options, draft_tokens="auto")
    assert done.stats.drafter == "draft-model"
    assert done.token_ids == model.complete(**options, draft_tokens=0).token_ids
    assert [len(list((place / "measured").iterdir())) for place in (target, draft)] == [1, 1]


def test_whole_cycles_are_chosen_for_too(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    layers = ["linear_attention", "full_attention"]
    checkpoint = partial_checkpoint(tmp_path / "c", layer_types=layers, noise=0.2, head_noise=1.0)
    out = build_bundle(checkpoint, tmp_path / "b", draft_tokens=3)
    model = load(out, options=EngineOptions(backend="torch", device="cpu", threads=1))
    for drafter in ("mtp", "ngram"):
        done = generate(model, PROMPT, 40, "auto", drafter=drafter)  # type: ignore[arg-type]
        assert list(done.token_ids) == ids_of(load_model(out), PROMPT, 40)
        assert sum(done.stats.draft_tokens_chosen.values()) == done.stats.cycles
    assert len(list((out / "measured").iterdir())) == 2, "whole cycles, and the calls of the host"


def test_auto_is_plain_decoding_where_nothing_can_be_drafted(tmp_path: Path) -> None:
    model = load_model(build_bundle(markov_checkpoint(tmp_path / "c"), tmp_path / "b", mtp=False))
    done = generate(model, [5], 4, "auto")  # type: ignore[arg-type]
    assert (list(done.token_ids), done.stats.drafted, done.stats.drafter) == ([6, 7, 8, 9], 0, "none")
    looked_up = generate(model, [5, 6, 7, 5, 6], 12, "auto", drafter="ngram")  # type: ignore[arg-type]
    assert list(looked_up.token_ids) == ids_of(model, [5, 6, 7, 5, 6], 12)
    assert not (tmp_path / "b" / "measured" / "nothing").exists()


def test_auto_is_counted_as_the_loop_counts(partial: Model) -> None:
    """A fixed K has a histogram too, and the cut at the end is not what was chosen."""
    done = generate(partial, PROMPT, TOKENS, 3)
    found = counts(done)["draft_tokens_chosen"]
    assert sum(found.values()) == done.stats.cycles
    assert set(found) <= {"0", "1", "2", "3"}
    assert found["3"] > 1
    assert generate(partial, PROMPT, TOKENS, 0).stats.draft_tokens_chosen == {0: TOKENS - 1}


@pytest.mark.parametrize("value", ["all", "3", 3.0, True, [3]], ids=repr)
def test_another_word_than_auto_is_refused(partial: Model, value: Any) -> None:
    with refused("draft_tokens", repr(value), "a whole number or 'auto'", error=RequestError):
        partial.complete(prompt_ids=PROMPT, draft_tokens=value)


def test_a_json_line_may_say_auto(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt_ids": [5], "draft_tokens": "auto"}\n{"prompt_ids": [5]}\n{"prompt_ids": [5], "draft_tokens": 0}\n'
    )
    assert [request.draft_tokens for request in requests_from_file(file, {"draft_tokens": 2})] == ["auto", 2, 0]
    file.write_text('{"prompt_ids": [5], "draft_tokens": "often"}\n')
    with refused("line 1", "'often'", "'auto'"):
        requests_from_file(file, {})


def test_the_command_takes_auto_and_refuses_other_words(tmp_path: Path) -> None:
    out = build_bundle(markov_checkpoint(tmp_path / "c"), tmp_path / "b")
    arguments = ["generate", out, "--prompt-ids", "5", "--max-new-tokens", "6", "--json", "--draft-tokens"]
    done = run_command("mtp-run", *arguments, "auto")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["token_ids"] == [6, 7, 8, 9, 10, 11]
    assert sum(record["stats"]["draft_tokens_chosen"].values()) == record["stats"]["cycles"]
    command_refused_use = run_command("mtp-run", *arguments, "often")
    command_refused(command_refused_use, "'often' is neither a whole number nor 'auto'", code=2)


# In company


def test_auto_goes_by_the_costs_of_the_company_that_it_has_now() -> None:
    """Alone a further row costs little; together it costs as much as the first one, so that nothing is drafted."""
    alone = CycleCosts((10.0, 10.5, 11.0), (1.0, 2.0), 0.0, 0.5)
    crowded = CycleCosts((3.0, 6.0, 9.0), (0.5, 1.0), 0.0, 0.5)
    now = [alone]
    policy = AutoPolicy(alone, together=lambda: now[0])
    chosen: dict[bool, list[int]] = {True: [], False: []}
    for number in range(200):
        quiet = number % 100 < 50
        now[0] = alone if quiet else crowded
        width = policy.choose(number)
        chosen[quiet].append(width)
        policy.observe(width, width if number % 2 else 0)
    assert np.mean([width == 2 for width in chosen[True]]) > 0.9
    assert np.mean([width == 0 for width in chosen[False]]) > 0.9
    deaf = AutoPolicy(alone, prior=0.6)
    assert deaf.choose(0) == 2, "control: without company it drafts"


def test_the_costs_in_company_are_those_of_the_largest_measured_one_that_is_not_larger(
    partial: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def pretend(*parts: object, answers: int = 1, whole: bool = False) -> CycleCosts:
        asked.append(answers)
        return CycleCosts((float(answers),) * 9, (1.0,) * 8, 0.0, 0.0)

    monkeypatch.setattr(auto, "costs_of", pretend)
    found = auto.Auto(auto.Opened(partial.bundle, partial.engine, EngineOptions()))
    found.measure(5)
    assert asked == [1, 2, 4, 5]
    for now, size in ((1, 1), (2, 2), (3, 2), (4, 4), (5, 5)):
        assert found.known("mtp", now).verify[0] == size
    fresh = auto.Auto(auto.Opened(partial.bundle, partial.engine, EngineOptions()))
    assert fresh.known("mtp", 5).verify[0] == 1, "nothing is measured while answers wait"
