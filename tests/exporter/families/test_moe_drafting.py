"""Mixture-of-experts heads at work: every draft and every accepted count of whole generations, alone and in a batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from mtp_tools.verify.checks import checks
from tests.exporter.families.moe_cases import MARGIN, Case, partial_case
from tests.fixtures.moe_families import MAKERS
from tests.oracles.moe_families import FAULTS, Speculation, open_oracle
from tests.oracles.test_moe_families import HEAD_ALONE, IN_SPECULATION
from tests.runtime.parts import plain, recorded
from tests.runtime.test_batch import Slot, _decode
from tests.support import build_bundle, generate, load_model

# Found by trying: with these every accepted count occurs at every K, and no expert is chosen by a hair.
PROMPTS = {family: [7, 40, 20] if family == "deepseek_v3" else [5, 6, 20] for family in MAKERS}
NEW = 48


@pytest.fixture(scope="module", params=MAKERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A noisy chain for K up to 4 and two sequences."""
    build = {"draft_tokens": 4, "max_batch_size": 2}
    return partial_case(tmp_path_factory.mktemp("partial"), request.param, build)


@cache
def speculation(checkpoint: Path, family: str, draft_tokens: int, fault: str | None = None) -> Speculation:
    """The float64 loop over NEW tokens, fewer with a fault."""
    limit = NEW if fault is None else 20
    return open_oracle(checkpoint, fault).speculate(PROMPTS[family], limit, draft_tokens)


@pytest.mark.parametrize("draft_tokens", range(5))
def test_generations_draft_and_accept_what_the_float64_loop_does(case: Case, draft_tokens: int) -> None:
    prompt = PROMPTS[case.family]
    greedy = speculation(case.checkpoint, case.family, 0).ids
    assert case.oracle.routing_margin([*prompt, *greedy]) > MARGIN
    want = speculation(case.checkpoint, case.family, draft_tokens)
    assert want.ids == greedy
    if draft_tokens:
        assert set(want.accepted) == set(range(draft_tokens + 1)), "not every accepted count occurs"
    run, recorder = recorded(case.model, prompt, NEW, draft_tokens=draft_tokens)
    assert run.ids == greedy
    assert recorder.drafts == [draft for draft in want.drafts if draft]
    assert run.accepted == want.accepted
    stats = generate(case.model, prompt, NEW, draft_tokens, ignore_eos=True).stats
    assert (stats.drafted, stats.accepted) == (sum(want.drafted), sum(want.accepted))
    assert stats.emitted_histogram == {count + 1: want.accepted.count(count) for count in sorted(set(want.accepted))}


def test_greedy_decoding_is_the_float64_greedy(case: Case) -> None:
    """Not by way of the oracle's own loop with K = 0."""
    assert speculation(case.checkpoint, case.family, 0).ids == case.oracle.greedy(PROMPTS[case.family], NEW)


def test_it_is_lossless_with_every_forced_draft_and_state(case: Case) -> None:
    lines = list(checks(case.model, 12, 20))
    assert [line.text for line in lines if not line.holds] == []
    assert "every accepted count from 0 to 4 was reached" in {line.text for line in lines}
    assert case.model.engine.numerics == "exact"


def test_two_sequences_of_a_batch_are_their_solo_runs(case: Case) -> None:
    """Ids, drafts, accepted counts and every committed state, while one prompt ends calls before the other."""
    prompts, limits = ([5, 6, 20], [9, 8, 7, 30, 31, 33, 35, 60, 3, 17, 22, 40]), (30, 21)
    alone = [plain(case.model, prompt, limit, states=True) for prompt, limit in zip(prompts, limits, strict=True)]
    slots = [Slot(list(p), limit, run.ids) for p, limit, run in zip(prompts, limits, alone, strict=True)]
    _decode(case.model.engine.sequences(2), slots, 64)
    for slot, run in zip(slots, alone, strict=True):
        drafting, recorder = recorded(case.model, slot.prompt, slot.limit, draft_tokens=4)
        assert slot.ids == run.ids == drafting.ids
        assert slot.accepted == drafting.accepted
        assert [draft for draft in slot.drafts if draft] == recorder.drafts
        assert slot.states, "no state was looked at"
        assert all(digests == run.states[length] for length, digests in slot.states.items())
    assert len(set().union(*(slot.accepted for slot in slots))) >= 3, "the sequences hardly ever took turns"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "deepseek_v3"])
def test_a_head_that_is_always_right_has_every_draft_accepted(tmp_path: Path, family: str) -> None:
    """LD-17: its projection passes on the embedding, which comes first; read the other way round it is never right."""
    checkpoint = MAKERS[family](tmp_path / "c", seed=1, markov=True)
    model = load_model(build_bundle(checkpoint, tmp_path / "b", draft_tokens=4))
    for draft_tokens in range(1, 5):
        finished = generate(model, [5], 20, draft_tokens)
        assert list(finished.token_ids) == list(range(6, 26))
        assert finished.stats.accepted == finished.stats.drafted > 0
    swapped = open_oracle(checkpoint, "swap_concat").speculate([5], 20, 3)
    assert sum(swapped.accepted) == 0
    assert [draft[0] for draft in swapped.drafts if draft] == list(range(6, 24)), "the current token again"


# ----------------------------------------------------------------------------------------- faults

IN_IDS = {"state_not_rolled_back", "conv_state_post_silu"}
IN_DRAFTS = (HEAD_ALONE | IN_SPECULATION) - {"own_head_ignored", "state_not_rolled_back"}


@pytest.mark.parametrize("fault", sorted(IN_DRAFTS))
def test_control_a_head_that_is_fed_wrongly_drafts_otherwise(case: Case, fault: str) -> None:
    """What pairs rows with tokens, and what is kept between two cycles, shows in the drafts alone."""
    prompt = PROMPTS[case.family]
    right, wrong = (speculation(case.checkpoint, case.family, 3, broken) for broken in (None, fault))
    _, recorder = recorded(case.model, prompt, NEW, draft_tokens=3)
    # Up to its first difference it is the same loop over the same text.
    cycles = len(wrong.drafts) - 1
    assert recorder.drafts[:cycles] == right.drafts[:cycles]
    assert recorder.drafts[:cycles] != wrong.drafts[:cycles], f"this test cannot see that {FAULTS[case.family][fault]}"


@pytest.mark.parametrize("fault", sorted(IN_IDS))
def test_control_a_state_that_is_kept_wrongly_changes_the_ids(case: Case, fault: str) -> None:
    if fault not in FAULTS[case.family]:
        assert not list(case.model.engine.spec.delta_layers()), "only recurrent states cannot be cut by a length"
        return
    wrong = speculation(case.checkpoint, case.family, 3, fault).ids
    assert generate(case.model, PROMPTS[case.family], len(wrong), 3).token_ids != tuple(wrong)
