"""What ends a generation: end tokens inside a block, limits, and the reason that is given."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_runtime.ending import Ending
from mtp_runtime.text import TextStream
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer, write_tokenizer
from tests.runtime.conftest import Models
from tests.runtime.parts import Recorder, limit_only, plain, play, recorded, streamed
from tests.support import build_bundle, generate, load_model, refused

PIECES = tuple(chr(ord("0") + token) for token in range(64))


@pytest.mark.parametrize("draft_tokens", range(5))
@pytest.mark.parametrize(("eos", "expected"), [(12, list(range(6, 13))), (6, [6]), (7, [6, 7])])
def test_an_end_token_inside_a_block_ends_the_generation(
    markov: Models, eos: int, expected: list[int], draft_tokens: int
) -> None:
    """RT-01: exactly the ids up to the end token for every K, streamed and not."""
    run = streamed(markov(eos=eos), prompt_ids=[5], max_new_tokens=20, draft_tokens=draft_tokens)
    assert run.ids == expected
    assert run.finished.finish_reason == "eos"


def test_end_tokens_stood_at_every_place_of_a_block(markov: Models) -> None:
    """RT-01: with K = 4 the blocks are 6 | 7 to 11 | 12 to 16, so these end tokens cut after 1 to 5 tokens."""
    places = []
    for eos in range(7, 12):
        run = play(markov(), [5], 20, 4, ending=limit_only(20, {eos}))
        assert run.ids == list(range(6, eos + 1))
        places.append(len(run.blocks[-1]))
    assert places == [1, 2, 3, 4, 5]


def test_several_end_tokens_end_at_the_first_of_them(markov: Models) -> None:
    """RT-01: a list of end tokens, two of them in one block."""
    model = markov(eos=[14, 13])
    for draft_tokens in range(5):
        run = streamed(model, prompt_ids=[5], max_new_tokens=20, draft_tokens=draft_tokens)
        assert run.ids == list(range(6, 14))


def test_control_looking_at_the_last_token_of_a_block_runs_past_the_end(markov: Models) -> None:
    """RT-01: the fault of the case is visible to the checks above."""

    class LooksAtTheLast(Ending):
        def cut(self, block: list[int]) -> list[int]:
            if block[-1] in self._end_tokens:
                self.reason = "eos"
            return block

    faulty = LooksAtTheLast(20, {12}, TextStream(None, ()))
    assert play(markov(eos=12), [5], 20, 4, ending=faulty).ids != list(range(6, 13))
    assert play(markov(eos=12), [5], 20, 4, ending=limit_only(20, {12})).ids == list(range(6, 13))


def test_the_text_of_a_special_end_token_is_hidden_for_every_k(tmp_path: Any) -> None:
    """RT-01: a special end token leaves no text, an end token that is none shows its piece, as in plain decoding."""
    special = markov_checkpoint(tmp_path / "special", eos=12)
    write_tokenizer(special, tinytext_tokenizer(PIECES), eos=12)
    ordinary = markov_checkpoint(tmp_path / "ordinary", eos=12, tokenizer=tinytext_tokenizer(PIECES))
    texts = {}
    for checkpoint in (special, ordinary):
        model = load_model(build_bundle(checkpoint, tmp_path / f"{checkpoint.name}-bundle"))
        runs = [streamed(model, prompt_ids=[5], max_new_tokens=20, draft_tokens=k) for k in range(5)]
        (texts[checkpoint.name],) = {run.finished.text for run in runs}
    assert texts == {"special": "".join(PIECES[6:12]), "ordinary": "".join(PIECES[6:13])}


@pytest.mark.parametrize("draft_tokens", range(9))
def test_exactly_the_limit_is_emitted(markov: Models, draft_tokens: int) -> None:
    """RT-05: every limit from 1 to 12 for every K, streamed and not."""
    model = markov()
    for limit in range(1, 13):
        run = streamed(model, prompt_ids=[5], max_new_tokens=limit, draft_tokens=draft_tokens)
        assert run.ids == list(range(6, 6 + limit))
        assert run.finished.finish_reason == "length"


def test_no_draft_is_made_that_the_limit_could_not_let_out(markov: Models) -> None:
    """RT-05 and P4: near the limit K is cut, so a verify never has more rows than tokens are left."""
    for limit in range(1, 13):
        run, recorder = recorded(markov(), [5], limit, draft_tokens=4)
        left = limit - 1
        for rows, block in zip(recorder.verified_rows[1:], run.blocks[1:], strict=True):
            assert rows == min(5, left)
            left -= len(block)
        assert left == 0


def test_control_a_limit_looked_at_between_blocks_only_is_overshot(markov: Models) -> None:
    """RT-05: the fault of the case, a whole block after the last look, is visible to the checks above."""

    class OneBlockLate(Ending):
        def remaining(self, emitted: int) -> int:
            return super().remaining(emitted) + 4 if emitted < self._limit else 0

    overshot = [
        limit
        for limit in range(1, 13)
        if len(play(markov(), [5], limit, 3, ending=OneBlockLate(limit, (), TextStream(None, ()))).ids) != limit
    ]
    assert overshot, "this check cannot see a limit that is overshot"


def test_rejected_drafts_are_not_charged_to_the_limit(markov: Models) -> None:
    """RT-06: 20 tokens are delivered, whatever was drafted; the counts are those of the closed form."""
    wrong = streamed(markov(draft="wrong"), prompt_ids=[5], max_new_tokens=20, draft_tokens=3)
    assert wrong.ids == list(range(6, 26))
    assert wrong.accepted == [0] * 19
    # Sixteen cycles draft 3; with 3, 2 and 1 tokens left, K is cut to 2, 1 and 0.
    assert (wrong.finished.stats.drafted, wrong.finished.stats.accepted) == (51, 0)
    third = streamed(markov(draft="third"), prompt_ids=[5], max_new_tokens=20, draft_tokens=3)
    assert third.ids == list(range(6, 26))
    assert third.accepted == [0, 2, 2, 2, 2, 2, 2]
    # The last cycle has 3 tokens left and drafts 2.
    assert (third.finished.stats.drafted, third.finished.stats.accepted) == (20, 12)


def test_control_charging_drafts_to_the_limit_delivers_too_little(markov: Models) -> None:
    """RT-06: the fault of the case is visible to the check above."""
    model = markov(draft="wrong")
    recorder = Recorder(model.engine.sequences())

    class ChargesDrafts(Ending):
        def remaining(self, emitted: int) -> int:
            return max(super().remaining(emitted) - sum(map(len, recorder.drafts)), 0)

    run = play(model, [5], 20, 3, wrap=lambda inner: recorder, ending=ChargesDrafts(20, (), TextStream(None, ())))
    assert len(run.ids) < 20, "this check cannot see drafts that are charged to the limit"


@pytest.mark.parametrize("draft_tokens", [0, 1, 3])
def test_limits_of_zero_and_one(markov: Models, draft_tokens: int) -> None:
    """RT-07: 0 emits nothing, not even the token of the prefill; 1 emits that one and drafts nothing."""
    none = streamed(markov(), prompt_ids=[5], max_new_tokens=0, draft_tokens=draft_tokens)
    assert (none.ids, none.blocks, none.finished.finish_reason) == ([], [], "length")
    one = streamed(markov(), prompt_ids=[5], max_new_tokens=1, draft_tokens=draft_tokens)
    assert (one.ids, one.finished.finish_reason, one.finished.stats.drafted) == ([6], "length", 0)
    # A limit of 2 is the control: it needs one cycle, so the zeros above are not zeros of any run.
    two = streamed(markov(), prompt_ids=[5], max_new_tokens=2, draft_tokens=draft_tokens)
    assert (two.ids, two.finished.stats.cycles) == ([6, 7], 1)


def test_a_limit_of_one_calls_neither_head_nor_verify(markov: Models) -> None:
    """RT-07: no draft call is needed for one token; with more tokens the same recorder sees some."""
    calls = {}
    for limit in (1, 6):
        _, recorder = recorded(markov(), [5], limit, draft_tokens=3)
        calls[limit] = (recorder.draft_calls, len(recorder.verified_rows))
    # The first verify is the prefill; the last of six tokens is one more cycle, without a draft.
    assert calls == {1: (0, 1), 6: (1, 3)}


def test_limits_that_are_no_counts_are_refused(markov: Models) -> None:
    """RT-07: a negative limit and one that is no number."""
    for draft_tokens in (0, 1, 3):
        with refused("max_new_tokens", "-1", "at least 0"):
            generate(markov(), [5], -1, draft_tokens)
        for value in ("x", 1.5, True):
            with refused("max_new_tokens", repr(value)):
                markov().complete(prompt_ids=[5], max_new_tokens=value, draft_tokens=draft_tokens)


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize(
    ("options", "expected", "reason"),
    [
        ({"max_new_tokens": 20}, list(range(6, 13)), "eos"),
        ({"max_new_tokens": 20, "stop": PIECES[9] + PIECES[10]}, list(range(6, 11)), "stop"),
        ({"max_new_tokens": 4}, [6, 7, 8, 9], "length"),
        ({"max_new_tokens": 500, "ignore_eos": True}, [(6 + i) % 64 for i in range(63)], "length"),
        # Two ends at the same token: what the model or the stop text said comes before the limit.
        ({"max_new_tokens": 7}, list(range(6, 13)), "eos"),
        ({"max_new_tokens": 5, "stop": PIECES[9] + PIECES[10]}, list(range(6, 11)), "stop"),
        ({"max_new_tokens": 20, "stop": PIECES[11] + PIECES[12]}, list(range(6, 13)), "stop"),
    ],
    ids=["eos", "stop", "length", "context full", "eos at the limit", "stop at the limit", "stop at eos"],
)
def test_the_reason_is_the_same_for_every_k_and_mode(
    markov: Models, options: dict[str, Any], expected: list[int], reason: str, draft_tokens: int
) -> None:
    """SV-07: one reason for each kind of end, streamed and not."""
    run = streamed(markov(eos=12, pieces=PIECES), prompt_ids=[5], draft_tokens=draft_tokens, **options)
    assert run.ids == expected
    assert run.finished.finish_reason == reason


@pytest.mark.parametrize("draft_tokens", range(5))
def test_ignored_end_tokens_do_not_end(markov: Models, draft_tokens: int) -> None:
    """RT-53: ignore_eos passes through end tokens inside a block as plain decoding does."""
    run = streamed(markov(eos=[8, 12]), prompt_ids=[5], max_new_tokens=10, draft_tokens=draft_tokens, ignore_eos=True)
    assert run.ids == list(range(6, 16))
    assert run.finished.finish_reason == "length"
    always = markov(target=_always_twelve, eos=12)
    run = streamed(always, prompt_ids=[5], max_new_tokens=10, draft_tokens=draft_tokens, ignore_eos=True)
    assert run.ids == [12] * 10
    # The control: without the option the same bundles end there.
    assert generate(markov(eos=[8, 12]), [5], 10, draft_tokens).token_ids == (6, 7, 8)
    assert generate(always, [5], 10, draft_tokens).token_ids == (12,)


def test_rows_of_a_block_that_an_end_cut_are_not_committed(markov: Models) -> None:
    """RT-20: the committed length is prompt + delivered - 1, the newest token not being consumed, for every K."""
    for draft_tokens in range(5):
        for eos in range(6, 14):
            sequences = markov().engine.sequences()
            run = play(markov(), [5], 20, draft_tokens, sequences=sequences, ending=limit_only(20, {eos}))
            assert run.ids == list(range(6, eos + 1))
            assert sequences.lengths.tolist() == [len(run.ids)]


def test_plain_decoding_is_the_closed_form(markov: Models) -> None:
    """P2: the reference of this file, ids and wrap-around, does not come from the product."""
    assert plain(markov(), [60], 10).ids == [61, 62, 63, 0, 1, 2, 3, 4, 5, 6]


def _always_twelve(token: int) -> int:
    return 12
